"""Tokens for Amazon MSK with IAM: signed by aws-msk-iam-sasl-signer-python with the credentials that boto finds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from dualwrite.errors import BrokerUnavailableError, ConfigurationError, MissingDependencyError
from dualwrite.kafka.client.callback_tokens import CONFIG
from dualwrite.kafka.client.tokens import Token

_OPTIONS: Final = ("region", "profile", "role", "session")
_SESSION: Final = "dualwrite"


@dataclass(frozen=True, slots=True)
class MskIam:
    """Signs a token for a region, with the credentials of the environment, a profile, or a role.

    Args:
        region: The AWS region of the cluster.
        profile: A profile of AWS's configuration files, or empty.
        role: The ARN of a role to assume, or empty.
        session: The name of the role's session, which AWS's logs show.
    """

    region: str
    profile: str = ""
    role: str = ""
    session: str = _SESSION

    METHOD: ClassVar[str] = "msk-iam"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From `sasl.oauthbearer.config`: `region=eu-west-1`, and perhaps `profile=…` or `role=…` and `session=…`.

        Without a region, it is that of `AWS_REGION` or `AWS_DEFAULT_REGION`.

        Raises:
            ConfigurationError: There is no region, or another option.
            MissingDependencyError: The extra `msk` is not installed.
        """
        pairs = [pair.partition("=") for pair in str(given.get(CONFIG) or "").replace(",", " ").split()]
        options = {name: value for name, _, value in pairs}
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise ConfigurationError(
                f"{CONFIG} has an unknown option {unknown[0]!r}.", next_step=f"{cls.METHOD} has {', '.join(_OPTIONS)}"
            )
        options.setdefault("region", os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "")
        if not options["region"] or (options.get("profile") and options.get("role")):
            raise ConfigurationError(
                f"{cls.METHOD} needs a region, and either a profile or a role or none of them.",
                next_step=f"set {CONFIG}=region=eu-west-1, or AWS_REGION",
            )
        _signer()
        return cls(**options)

    def __str__(self) -> str:
        return f"AWS IAM in {self.region}"

    def fetch(self) -> Token:
        """Sign one; see `TokenSource`. Only a role, or credentials from a service of AWS, need the network."""
        signer = _signer()
        try:
            if self.role:
                text, expires_ms = signer.generate_auth_token_from_role_arn(self.region, self.role, self.session)
            elif self.profile:
                text, expires_ms = signer.generate_auth_token_from_profile(self.region, self.profile)
            else:
                text, expires_ms = signer.generate_auth_token(self.region)
        except Exception as error:  # boto's errors have no common base, and credentials come from many places
            raise BrokerUnavailableError(
                f"No token from {self}: {type(error).__name__}: {error}.",
                cause="boto finds no credentials, they have expired, or a service of AWS does not answer",
                next_step="check them with `aws sts get-caller-identity`",
            ) from error
        return Token(text, expires_ms / 1000)


def _signer() -> Any:
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise MissingDependencyError(
            f"sasl.oauthbearer.method={MskIam.METHOD} needs aws-msk-iam-sasl-signer-python, which is not installed.",
            next_step='pip install "dualwrite[msk]"',
        ) from error
    return MSKAuthTokenProvider

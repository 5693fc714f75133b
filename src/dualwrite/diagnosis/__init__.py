"""The guarantee that a cluster and a database give together, what weakens it, and which settings improve it."""

from dualwrite.diagnosis.database_findings import judge_database
from dualwrite.diagnosis.examination import Diagnosis, examine
from dualwrite.diagnosis.findings import DatabaseFacts, Finding, Guarantee, Promise, Severity

__all__ = [
    "DatabaseFacts",
    "Diagnosis",
    "Finding",
    "Guarantee",
    "Promise",
    "Severity",
    "examine",
    "judge_database",
]

"""`dualwrite dev`: start, inspect and stop a local Kafka cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualwrite.cli.options import AsJson, JsonGroup, pairs
from dualwrite.cli.output import print_json
from dualwrite.devcluster import (
    DEFAULT_KAFKA_VERSION,
    ClusterStatus,
    DevCluster,
    DevClusterError,
    TerminalProgress,
    cluster_names,
)
from dualwrite.texts import error_text

app = typer.Typer(no_args_is_help=True, cls=JsonGroup)

Name = Annotated[str, typer.Option("--name", "-n", help="Name of the cluster.")]


@app.command()
def up(
    *,
    name: Name = "default",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes: 1 or 3.", show_default="1")] = None,
    kafka_version: Annotated[str | None, typer.Option(help="Version of Kafka.", show_default=DEFAULT_KAFKA_VERSION)] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory for data and logs.")] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A broker property; repeatable.")] = None,
    feature: Annotated[list[str] | None, typer.Option(metavar="NAME=LEVEL", help="A feature level; repeatable.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the first node; by default free ports are chosen.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until the cluster is ready.")] = 60.0,
) -> None:
    """Start a cluster: download what is missing, start the brokers, wait until they are ready."""
    with TerminalProgress() as progress:
        cluster = DevCluster(
            name,
            nodes=nodes,
            kafka_version=kafka_version,
            data_dir=data_dir,
            config=pairs(config, "--config") or None,
            features=pairs(feature, "--feature") or None,
            port=port,
            progress=progress,
        )
        status = cluster.up(timeout=timeout)
    _show([status])


@app.command()
def status(
    *,
    name: Name = "default",
    everything: Annotated[bool, typer.Option("--all", help="All clusters.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a cluster: bootstrap servers, nodes, processes, logs."""
    found = [DevCluster(each).status() for each in (cluster_names() if everything else [name])]
    if as_json:
        print_json("dev status", {"clusters": [each.to_json() for each in found]})
    else:
        _show(found)


@app.command()
def logs(
    *,
    name: Name = "default",
    node: Annotated[int, typer.Option(help="Node id.")] = 1,
    lines: Annotated[int, typer.Option(help="How many lines from the end.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing as the log grows.")] = False,
) -> None:
    """Show a broker's log."""
    cluster = DevCluster(name)
    if not follow:
        typer.echo(cluster.logs(node, lines=lines))
        return
    for line in cluster.follow_logs(node, lines=lines):
        typer.echo(line)


@app.command()
def down(
    *,
    name: Name = "default",
    everything: Annotated[bool, typer.Option("--all", help="All clusters.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Remove data and logs too.")] = False,
) -> None:
    """Stop a cluster; its data is kept unless --purge is given."""
    errors: list[DevClusterError] = []
    for each in cluster_names() if everything else [name]:
        try:
            cluster = DevCluster(each)
            existed = cluster.exists
            cluster.down(purge=purge)
        except DevClusterError as error:
            errors.append(error)
        else:
            typer.echo(f"Cluster {each} is {'removed' if purge else 'down'}." if existed else f"There is no cluster {each}.")
    for earlier in errors[:-1]:
        typer.echo(error_text(earlier), err=True)
    if errors:
        raise errors[-1]


def _show(found: list[ClusterStatus]) -> None:
    if not found:
        typer.echo("There is no cluster. `dualwrite dev up` creates one.")
    for each in found:
        state = "ready" if each.ready else "not ready" if each.running else "down"
        typer.echo(f"{each.name}: Kafka {each.kafka_version}, {state}")
        for listener, servers in each.listeners.items():
            typer.echo(f"  {listener:<15}{servers}")
        for node in each.nodes:
            process = f"process {node.pid}{', paused' if node.paused else ''}" if node.alive else "not running"
            typer.echo(f"  node {node.node_id:<10}port {node.port}, {process}, log {node.log_file}")

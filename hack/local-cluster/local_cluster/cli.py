"""The commands: up, down, cut-off, mend, status, enable, disable, tool, load, build, push, check-gpu-image, cache."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from local_cluster import buildah, cluster, containerd, gpu_image, images, locks, packaged, teardown
from local_cluster import cache as kept
from local_cluster.addons import ADDONS, Addon
from local_cluster.layout import MAX_NODES, ClusterError, Layout
from local_cluster.processes import recorded
from local_cluster.steps import Steps
from local_cluster.toolchain import ensure_packages, missing_packages

app = typer.Typer(
    help="A real Kubernetes from source, with fake GPUs, for machines with no container engine.",
    no_args_is_help=True,
)
console = Console(stderr=True)

Home = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        envvar="STAGE2_CLUSTER_DIR",
        help="The cluster's folder, removed by `down`.",
        show_default="/var/lib/stage2-cluster",
    ),
]


def _layout(home: Path | None) -> Layout:
    return Layout.default(home.resolve() if home else None)


def _fail(error: ClusterError) -> typer.Exit:
    console.print(f"local-cluster: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(1)


@app.command()
def up(
    home: Home = None,
    control_plane_only: Annotated[
        bool, typer.Option("--control-plane-only", help="Only etcd and the API server.")
    ] = False,
    gpus: Annotated[int, typer.Option(help="How many fake nvidia.com/gpu each node advertises.")] = 4,
    nodes: Annotated[
        int, typer.Option(min=1, max=MAX_NODES, help="How many nodes; each after the first has a network of its own.")
    ] = 1,
) -> None:
    """Build what is missing (some minutes the first time), boot, and print where the kubeconfig is.

    STAGE2_KUBERNETES=1.37.2 in the environment takes another version than the pinned one.
    """
    layout = _layout(home)
    started = time.monotonic()
    try:
        with locks.held(layout, "boot"):
            booted = cluster.up(layout, console, control_plane_only=control_plane_only, gpus=gpus, nodes=nodes)
        helm = None if control_plane_only else packaged.program(layout, "helm")
    except ClusterError as error:
        console.print("`local-cluster down` removes what has started.")
        raise _fail(error) from error
    console.print(f"Ready after {time.monotonic() - started:.0f} s." if booted else "The cluster is running already.")
    typer.echo(f"export KUBECONFIG={layout.kubeconfig}")
    if helm:
        console.print(f"helm: {helm}", highlight=False)


@app.command()
def down(home: Home = None) -> None:
    """Remove the cluster and every trace of it, also after a crash; built programs and images stay cached."""
    layout = _layout(home)
    try:
        with locks.held(layout, "boot"):
            if not layout.home.exists():
                console.print("No cluster is running.")
                return
            teardown.down(layout)
    except ClusterError as error:
        raise _fail(error) from error
    console.print("The cluster is gone.")


@app.command()
def cut_off(node: Annotated[int, typer.Argument(help="2 for stage2-local-2")], home: Home = None) -> None:
    """End all that runs on a further node at once, as if its power failed; `mend` brings it back."""
    found = {one.number: one for one in _layout(home).nodes()[1:]}
    if node not in found:
        raise typer.BadParameter(f"{node}; nodes that can be cut off: {', '.join(map(str, found)) or 'none'}")
    try:
        teardown.power_off(found[node])
    except ClusterError as error:
        raise _fail(error) from error
    console.print(f"{found[node].node_name} is off.")


@app.command()
def mend(home: Home = None) -> None:
    """Start what has died again, as a supervisor would; everything else, and all state, stays as it is."""
    layout = _layout(home)
    try:
        with locks.held(layout, "boot"):
            started = cluster.mend(layout)
    except ClusterError as error:
        raise _fail(error) from error
    console.print(f"Started again: {', '.join(started) or 'nothing'}.")


@app.command()
def status(home: Home = None) -> None:
    """Show the processes and the images; exit code 1 when no cluster runs."""
    layout = _layout(home)
    kind = cluster.running(layout)
    table = Table("process", "pid", "alive", title=kind or "no cluster, or a crashed one")
    for node in layout.nodes():
        for daemon in recorded(node):
            table.add_row(f"{daemon.name}{node.suffix}", str(daemon.pid), "yes" if daemon.alive() else "no")
    console.print(table)
    if kind is None:
        raise typer.Exit(1)
    typer.echo(f"export KUBECONFIG={layout.kubeconfig}")
    if kind == cluster.WHOLE:
        console.print(containerd.ctr(layout, "images", "list", "--quiet"), end="")


AddonName = Annotated[str, typer.Argument(help=" or ".join(ADDONS), metavar="ADDON")]


@app.command()
def enable(name: AddonName, home: Home = None) -> None:
    """Add Kueue or JobSet (built from their modules, by their own manifests), or kube-router for NetworkPolicies."""
    _on_cluster(home, _addon(name).enable)
    console.print(f"{name} runs.")


@app.command()
def disable(name: AddonName, home: Home = None) -> None:
    """Remove what `enable` added, and all objects of its kinds."""
    _on_cluster(home, _addon(name).disable)
    console.print(f"{name} is gone.")


def _addon(name: str) -> Addon:
    if name not in ADDONS:
        raise typer.BadParameter(f"{name!r}; must be one of {', '.join(ADDONS)}")
    return ADDONS[name]


def _on_cluster(home: Path | None, change: Callable[[Layout, Console], None]) -> None:
    """Change a cluster that runs whole."""
    layout = _layout(home)
    try:
        if cluster.running(layout) != cluster.WHOLE:
            raise ClusterError("no whole cluster runs here; `local-cluster up` boots one")
        change(layout, console)
    except ClusterError as error:
        raise _fail(error) from error


@app.command()
def tool(name: Annotated[str, typer.Argument(help=", ".join(packaged.NAMES))], home: Home = None) -> None:
    """Print the path of a program that tests use: the one on PATH, else one that a package ships."""
    if name not in packaged.NAMES:
        raise typer.BadParameter(f"{name!r}; must be one of {', '.join(packaged.NAMES)}")
    try:
        typer.echo(packaged.program(_layout(home), name))
    except ClusterError as error:
        raise _fail(error) from error


@app.command()
def load(archive: Annotated[Path, typer.Argument(exists=True, dir_okay=False)], home: Home = None) -> None:
    """Import an image archive (docker save, or OCI) into the running cluster."""
    layout = _layout(home)
    try:
        console.print(images.load_archive(layout, archive))
    except ClusterError as error:
        raise _fail(error) from error


@app.command()
def build(
    names: Annotated[list[str] | None, typer.Argument(help="controller, trainer; default: both")] = None,
    home: Home = None,
) -> None:
    """Build stage2's images, and load them when a cluster is running; `up` loads them otherwise."""
    layout = _layout(home)
    available = {image.name: image for image in images.PROJECT_IMAGES}
    if unknown := set(names or ()) - set(available):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; must be of {', '.join(available)}")
    try:
        wanted, loads = [available[name] for name in names or available], containerd.containerd_answers(layout)
        of_images = len(wanted) * (2 if loads else 1)
        steps = Steps(console, bool(missing_packages()) + images.base_missing(layout) + of_images)
        ensure_packages(steps)
        for image in wanted:
            images.build(layout, image, steps)
            if loads:
                with steps.step(f"loading {image.reference}"):
                    images.load_built(layout, image.reference)
    except ClusterError as error:
        raise _fail(error) from error


@app.command()
def push(
    repository: Annotated[str, typer.Argument(help="The folder of a registry, such as registry.example/team.")],
    home: Home = None,
    tag: Annotated[str, typer.Option(help="The tag of both images.")] = "dev",
    plain_http: Annotated[bool, typer.Option("--plain-http", help="Speak no TLS.")] = False,
) -> None:
    """Push stage2's images as they were built, and print the name of each by its digest."""
    layout = _layout(home)
    try:
        steps = Steps(console, len(images.PROJECT_IMAGES))
        for image in images.PROJECT_IMAGES:
            target = f"{repository}/{image.name}:{tag}"
            # A build prunes: it would remove the layers that are on their way.
            with locks.held(layout, "build"), steps.step(f"pushing {target}"):
                typer.echo(buildah.push(layout, image.reference, target, plain_http=plain_http))
    except ClusterError as error:
        raise _fail(error) from error


@app.command()
def check_gpu_image(home: Home = None) -> None:
    """Build the trainer image for GPUs, and examine it without one: 40 GB of free disk, and a quarter of an hour."""
    layout = _layout(home)
    try:
        right = gpu_image.check(layout, console)
    except ClusterError as error:
        raise _fail(error) from error
    if not right:
        raise typer.Exit(1)


@app.command()
def cache(
    home: Home = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what nothing uses any more.")] = False,
    empty: Annotated[bool, typer.Option("--empty", help="Remove everything; the next `up` builds it again.")] = False,
) -> None:
    """Say how large what is kept for the next `up` is, part by part."""
    layout = _layout(home)
    try:
        with locks.held(layout, "boot"), locks.held(layout, "build"), locks.held(layout, "load"):
            if empty:
                kept.empty(layout)
            elif prune:
                kept.prune(layout)
    except ClusterError as error:
        raise _fail(error) from error
    sizes = {part.name: part.size_bytes() for part in kept.parts(layout)}
    table = Table("part", "size in GB", title=str(layout.cache))
    for name, size in [*sizes.items(), ("together", sum(sizes.values()))]:
        table.add_row(name, f"{size / 1e9:.2f}")
    console.print(table)

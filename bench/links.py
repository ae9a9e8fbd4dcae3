"""A weight sync over links of 1 and 10 Gbit/s: an adapter that servers merge against merged layers that they are sent.

The servers run in a network namespace of their own, behind a pair of virtual Ethernet devices that `tc` slows down in
both directions. It needs root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.sync import RECIPE_RANK, RECIPE_WIDTH, TRAINED_LAYERS, Policy, adapted, merged, saved, servers
from bench.tables import Row, Table

NAMESPACE, NEAR, FAR = "stage2-links", "stage2-near", "stage2-far"
DEVICES, NAMESPACES = Path("/sys/class/net"), Path("/run/netns")
NEAR_ADDRESS, FAR_ADDRESS = "10.203.7.1", "10.203.7.2"
RATES = {"1 Gbit/s": ("1gbit", "512kb"), "10 Gbit/s": ("10gbit", "4mb")}  # rate, and what may go at once
LATENCY = "200ms"  # of packets that wait for their turn, before they are dropped


def rows() -> Iterator[Row]:
    """One to three servers behind one link of each rate."""
    for width in (1, 2):
        with saved(Policy(width)) as (policy, folder, size):
            for name, (rate, burst) in RATES.items():
                for count in (1, 2, 3):
                    with link(rate, burst), servers(count, folder, FAR_ADDRESS, _inside()) as (addresses, token):
                        what = f"{name}, {count} server{'s' * (count > 1)}, {size}"
                        yield from merged(what, adapted(policy), addresses, token, runs=3, disk=False)
                        if width == RECIPE_WIDTH:
                            recipe = adapted(policy, RECIPE_RANK, TRAINED_LAYERS)
                            yield from merged(
                                f"{what}, in the recipe's proportions", recipe, addresses, token, runs=3, disk=False
                            )


@contextmanager
def link(rate: str, burst: str) -> Iterator[None]:
    """Make the namespace and the link to it, and take both away again; and first what a killed run has left of them."""
    clear()
    try:
        _call("ip", "netns", "add", NAMESPACE)
        _call("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
        ends = (((), NEAR, NEAR_ADDRESS), (_inside(), FAR, FAR_ADDRESS))
        for prefix, device, address in ends:
            _call(*prefix, "ip", "address", "add", f"{address}/24", "dev", device)
            _call(*prefix, "ip", "link", "set", device, "up")
            shape = ("tbf", "rate", rate, "burst", burst, "latency", LATENCY)
            _call(*prefix, "tc", "qdisc", "add", "dev", device, "root", *shape)
        yield
    finally:
        clear()


def clear() -> None:
    """Take away the link, the servers behind it and the namespace, where they are."""
    if (DEVICES / NEAR).exists():
        _call("ip", "link", "delete", NEAR)  # and with it the other end
    if (NAMESPACES / NAMESPACE).exists():
        listed = subprocess.run(("ip", "netns", "pids", NAMESPACE), check=True, capture_output=True, text=True)
        for process in listed.stdout.split():
            os.kill(int(process), signal.SIGKILL)
        _call("ip", "netns", "delete", NAMESPACE)


def _inside() -> tuple[str, ...]:
    return ("ip", "netns", "exec", NAMESPACE)


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


TABLE = Table("Weight sync over a shaped link", "ms", 1e3, rows)

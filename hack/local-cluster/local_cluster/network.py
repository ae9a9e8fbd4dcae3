"""The node's network: its address, the CNI configuration, forwarding rules; and how all of it goes away again."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from local_cluster.layout import NODE_IP, NODE_LINK, POD_CIDR, SERVICE_CIDR, Layout
from local_cluster.processes import run

SYSCTLS = (
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/route_localnet",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What this module, kube-proxy and the kubelet set, machine-wide; `down` puts the former values back."""

CNI_NAME = "stage2-local"
FORWARD, POSTROUTING = "STAGE2-FORWARD", "STAGE2-POSTROUTING"
FIREWALL_CHAIN = re.compile(r"^KUBE-(ROUTER|NWPLCY|POD-FW)-")
FIREWALL_SETS = ("KUBE-SRC-", "KUBE-DST-", "kube-router-")
_UNCARRIED = (
    "from",
    POD_CIDR,
    "to",
    SERVICE_CIDR,
    "unreachable",
)  # routing sees what no rule of kube-proxy's translated
OWN_CHAIN = re.compile(r"^(KUBE-|STAGE2-)")


def set_up(layout: Layout) -> None:
    """Create the node's address, let pods reach the world, and write the CNI configuration.

    Pods cannot reach an address of a Service that kube-proxy does not carry (yet): a router of the machine's network
    might answer for it.
    """
    _save_sysctls(layout)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    run(["ip", "link", "add", NODE_LINK, "type", "bridge"])
    run(["ip", "address", "add", f"{NODE_IP}/32", "dev", NODE_LINK])
    run(["ip", "link", "set", NODE_LINK, "up"])
    rules = f"""*filter
:{FORWARD} - [0:0]
-A {FORWARD} -s {POD_CIDR} -j ACCEPT
-A {FORWARD} -d {POD_CIDR} -j ACCEPT
-A FORWARD -j {FORWARD}
COMMIT
*nat
:{POSTROUTING} - [0:0]
-A {POSTROUTING} -s {POD_CIDR} ! -d {POD_CIDR} -j MASQUERADE
-A POSTROUTING -j {POSTROUTING}
COMMIT
"""
    run(["iptables-restore", "--noflush"], stdin=rules)
    run(["ip", "rule", "add", *_UNCARRIED])
    _write_cni(layout)


def _write_cni(layout: Layout) -> None:
    """Routed veth pairs (ptp), not a bridge: a Service's reply always passes the host, which translates it back."""
    ipam = {
        "type": "host-local",
        "dataDir": str(layout.home / "cni" / "ipam"),
        "ranges": [[{"subnet": POD_CIDR}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [{"type": "ptp", "ipMasq": False, "mtu": 1400, "ipam": ipam}]
    folder = layout.home / "cni" / "net.d"
    folder.mkdir(parents=True)
    document = {"cniVersion": "1.0.0", "name": CNI_NAME, "plugins": plugins}
    (folder / "10-stage2.conflist").write_text(json.dumps(document, indent=2))


def tear_down(layout: Layout) -> None:
    """Remove the link, every chain of ours and of kube-proxy's, and restore the kernel's settings."""
    if Path(f"/sys/class/net/{NODE_LINK}").exists():
        run(["ip", "link", "delete", NODE_LINK])
    while subprocess.run(["ip", "rule", "delete", *_UNCARRIED], capture_output=True, check=False).returncode == 0:
        pass
    for family in ("iptables", "ip6tables"):
        if shutil.which(family):
            _remove_chains(family, OWN_CHAIN)
    _remove_sets()
    _restore_sysctls(layout)


def has_chain(name: str) -> bool:
    """Whether iptables has a chain of that name in its table `filter`."""
    return subprocess.run(["iptables", "--list", name, "--numeric"], capture_output=True, check=False).returncode == 0


def remove_firewall() -> None:
    """Remove what kube-router has left: its chains, and the sets that they name."""
    _remove_chains("iptables", FIREWALL_CHAIN)
    _remove_sets()


def _remove_sets() -> None:
    if shutil.which("ipset"):
        for name in run(["ipset", "list", "-name"]).splitlines():
            if name.startswith(FIREWALL_SETS):
                run(["ipset", "destroy", name])


def _remove_chains(family: str, ours: re.Pattern[str]) -> None:
    saved = subprocess.run([f"{family}-save"], capture_output=True, text=True, check=True).stdout
    for table, chains, jumps in _tables(saved, ours):
        commands = [
            *(jump.replace("-A", "-D", 1) for jump in jumps),
            *(f"-F {chain}" for chain in chains),
            *(f"-X {chain}" for chain in chains),
        ]
        if chains:
            run([f"{family}-restore", "--noflush"], stdin="\n".join([f"*{table}", *commands, "COMMIT", ""]))


def _tables(saved: str, ours: re.Pattern[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Per table of an iptables-save: the chains that are ours, and the rules of others' chains that jump to them."""
    for block in re.split(r"^\*", saved, flags=re.MULTILINE)[1:]:
        lines = block.splitlines()
        chains = [line[1:].split()[0] for line in lines if line.startswith(":") and ours.match(line[1:])]
        rules = [line for line in lines if line.startswith("-A ") and not ours.match(line[3:])]
        yield (
            lines[0],
            chains,
            [rule for rule in rules if any(re.search(rf"-j {re.escape(chain)}(\s|$)", rule) for chain in chains)],
        )


def _save_sysctls(layout: Layout) -> None:
    paths = {name: Path("/proc/sys") / name for name in SYSCTLS}
    values = {name: path.read_text().strip() for name, path in paths.items() if path.exists()}
    (layout.home / "sysctls.json").write_text(json.dumps(values))


def _restore_sysctls(layout: Layout) -> None:
    saved = layout.home / "sysctls.json"
    if not saved.exists():
        return
    for name, value in json.loads(saved.read_text()).items():
        path = Path("/proc/sys") / name
        if path.read_text().strip() != value:
            path.write_text(value)

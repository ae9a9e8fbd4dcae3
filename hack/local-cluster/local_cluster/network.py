"""The nodes' networks: addresses, the CNI configuration, forwarding rules; and how all of it goes away again.

The first node is the machine itself. A further one has a network of its own behind a port of the first one's bridge.
It also has mounts of its own, since the kubelet's folder of device plugins is compiled in.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from local_cluster.layout import KUBELET_STATE, NODE_IP, NODE_LINK, POD_CIDR, SERVICE_CIDR, Layout
from local_cluster.processes import NAMESPACES, on, run, spawn, wait_until

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
NEW_NODE = """
mount --bind "$1" "$2"
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
exec sleep infinity
"""
OWN_CHAIN = re.compile(r"^(KUBE-|STAGE2-)")


def set_up(nodes: Sequence[Layout]) -> None:
    """Create the nodes' addresses, let pods reach each other and the world, and write the CNI configurations.

    Pods cannot reach an address of a Service that kube-proxy does not carry (yet): a router of the machine's network
    might answer for it.
    """
    first, *further = nodes
    _set_up_machine(first)
    for node in further:
        _set_up_namespaces(node)
    for node in nodes:
        run(on(node, "ip", "rule", "add", *_UNCARRIED))
        _write_cni(node)
        for other in nodes:
            if other != node:
                run(on(node, "ip", "route", "add", other.pod_cidr, "via", other.node_ip))


def _set_up_machine(layout: Layout) -> None:
    _save_sysctls(layout)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    run(["ip", "link", "add", NODE_LINK, "type", "bridge"])
    run(["ip", "address", "add", f"{NODE_IP}/24", "dev", NODE_LINK])
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


def _set_up_namespaces(layout: Layout) -> None:
    """Start the process that holds a further node's namespaces, and connect it with the bridge."""
    state = layout.home / "device-plugins"
    for folder in (state, KUBELET_STATE):
        folder.mkdir(exist_ok=True)
    shell = ["sh", "-euc", NEW_NODE, "node", str(state), str(KUBELET_STATE)]
    holder = spawn(layout, NAMESPACES, ["unshare", "--mount", "--net", "--propagation=slave", *shell])
    command = Path(f"/proc/{holder.pid}/cmdline")
    done = b"sleep"  # the last that the shell starts
    wait_until(layout, lambda: command.read_bytes().startswith(done), what=layout.node_name, daemon=holder)
    run(["ip", "link", "add", _port(layout), "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)])
    run(["ip", "link", "set", _port(layout), "master", NODE_LINK])
    plug(layout, "up")
    run(on(layout, "ip", "address", "add", f"{layout.node_ip}/24", "dev", "eth0"))
    run(on(layout, "ip", "link", "set", "eth0", "up"))
    run(on(layout, "ip", "route", "add", "default", "via", NODE_IP))


def plug(layout: Layout, state: str) -> None:
    """Connect a further node with the others (`up`), or cut it off (`down`)."""
    run(["ip", "link", "set", _port(layout), state])


def _port(layout: Layout) -> str:
    """The bridge's port for a further node."""
    return f"{NODE_LINK}{layout.suffix}"


def _write_cni(layout: Layout) -> None:
    """Routed veth pairs (ptp), not a bridge: a Service's reply always passes the host, which translates it back."""
    ipam = {
        "type": "host-local",
        "dataDir": str(layout.home / "cni" / "ipam"),
        "ranges": [[{"subnet": layout.pod_cidr}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [{"type": "ptp", "ipMasq": False, "mtu": 1400, "ipam": ipam}]
    folder = layout.home / "cni" / "net.d"
    folder.mkdir(parents=True)
    document = {"cniVersion": "1.0.0", "name": CNI_NAME, "plugins": plugins}
    (folder / "10-stage2.conflist").write_text(json.dumps(document, indent=2))


def tear_down(layout: Layout) -> None:
    """Remove the links, every chain of ours and of kube-proxy's, and restore the kernel's settings."""
    for node in reversed(layout.nodes()):
        if Path(f"/sys/class/net/{_port(node)}").exists():
            run(["ip", "link", "delete", _port(node)])
    while subprocess.run(["ip", "rule", "delete", *_UNCARRIED], capture_output=True, check=False).returncode == 0:
        pass
    for family in ("iptables", "ip6tables"):
        if shutil.which(family):
            _remove_chains(layout, family, OWN_CHAIN)
    _remove_sets(layout)
    _restore_sysctls(layout)


def has_chain(layout: Layout, name: str) -> bool:
    """Whether a node's iptables has a chain of that name in its table `filter`."""
    command = on(layout, "iptables", "--list", name, "--numeric")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def remove_firewall(layout: Layout) -> None:
    """Remove what kube-router has left on a node: its chains, and the sets that they name."""
    _remove_chains(layout, "iptables", FIREWALL_CHAIN)
    _remove_sets(layout)


def _remove_sets(layout: Layout) -> None:
    if shutil.which("ipset"):
        for name in run(on(layout, "ipset", "list", "-name")).splitlines():
            if name.startswith(FIREWALL_SETS):
                run(on(layout, "ipset", "destroy", name))


def _remove_chains(layout: Layout, family: str, ours: re.Pattern[str]) -> None:
    saved = run(on(layout, f"{family}-save"))
    for table, chains, jumps in _tables(saved, ours):
        commands = [
            *(jump.replace("-A", "-D", 1) for jump in jumps),
            *(f"-F {chain}" for chain in chains),
            *(f"-X {chain}" for chain in chains),
        ]
        if chains:
            restore = on(layout, f"{family}-restore", "--noflush")
            run(restore, stdin="\n".join([f"*{table}", *commands, "COMMIT", ""]))


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

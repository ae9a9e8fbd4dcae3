"""Rules of a training YAML that runs without a job: it names its servers itself.

Source: semantics sections 3 and 11.
"""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule
from stage2_api.vllm import VllmServer

_SERVER = "custom.extra.rollout_matching.vllm.server"


def _server(config: RunConfig) -> VllmServer:
    return config.rollout_matching.vllm.server


def _has_legacy(server: VllmServer) -> bool:
    return server.base_url is not None or server.group_port is not None


def _pairs_badly(config: RunConfig) -> bool:
    """Tell whether the older form does not pair: text needs a port, a list needs a port or a list as long."""
    urls, ports = _server(config).base_url, _server(config).group_port
    if urls is None or ports is None:
        return (urls is None) != (ports is None)
    if isinstance(urls, str):
        return not isinstance(ports, int)
    return not urls or (isinstance(ports, list) and len(ports) != len(urls))


def _shares_an_address(config: RunConfig) -> bool:
    servers = () if _pairs_badly(config) else _server(config).resolved_servers()
    return len({s.base_url for s in servers}) < len(servers) or len({s.group_port for s in servers}) < len(servers)


STANDALONE_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=_SERVER,
        broken=lambda c: c.rollout_matching.uses_servers and _server(c).servers is None and not _has_legacy(_server(c)),
        cel=None,
        rule="server mode needs the addresses of its servers",
        way_out="set vllm.server.servers to a list of {base_url, group_port}, or vllm.mode to colocate",
    ),
    Rule(
        path=_SERVER,
        broken=lambda c: _server(c).servers is not None and _has_legacy(_server(c)),
        cel=None,
        rule="the addresses are given in two forms, servers and base_url with group_port",
        way_out="keep servers and remove base_url and group_port",
    ),
    Rule(
        path=f"{_SERVER}.group_port",
        broken=_pairs_badly,
        cel=None,
        rule="base_url and group_port must pair: one with one, a list with a list of the same length or with one port",
        way_out="write servers, a list of {base_url, group_port}, instead",
    ),
    Rule(
        path=_SERVER,
        broken=_shares_an_address,
        cel=None,
        rule="every server needs a base_url and a group_port of its own",
        way_out="change the one that stands twice",
    ),
)
"""Rules of a training YAML that runs without a job: nobody else fills in the servers."""

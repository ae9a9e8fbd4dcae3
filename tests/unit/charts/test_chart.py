"""The chart as helm renders it: manifests, missing and refused values, names, and what people of a namespace may do."""

import re
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.parsing import parse_job
from stage2_controller.children.build import static_children
from stage2_controller.children.network import CONTROLLER_LABELS
from tests.unit.charts.conftest import CHART, REPOSITORY, Manifests, Template

pytestmark = pytest.mark.in_turns(3, apart=True)

PARTS = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
Values = dict[str, Any]
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
# What may be taken away by null: no other way drops an entry of the default.
MAY_BE_NONE = (
    *(f"controller.{one}" for one in ("resources", "podSecurityContext.", "securityContext.")),
    *(f"controller.{one}Probe." for one in ("startup", "liveness", "readiness")),
    "metrics.dashboard.labels",
    "policy.largestJob",
)


def defaults() -> Values:
    values: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["image"]["repository"] = REPOSITORY
    for part in PARTS:
        values["metrics"][part]["enabled"] = True
    return values


def paths(values: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def rendered(helm: str, folder: Path, values: Values) -> subprocess.CompletedProcess[str]:
    """Return what helm makes of a chart whose own values are these: --reuse-values does so."""
    chart = folder / "stage2"
    chart.mkdir(exist_ok=True)
    for part in CHART.iterdir():
        if part.name != "values.yaml" and not (chart / part.name).exists():
            (chart / part.name).symlink_to(part)
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    return subprocess.run([helm, "template", "stage2", str(chart)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(helm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return rendered(helm, tmp_path_factory.mktemp("whole"), defaults()).stdout


@pytest.mark.parametrize("path", [".".join(path) for path in paths(defaults())])
def test_missing_value_uses_default_or_is_reported_by_name(helm: str, tmp_path: Path, whole: str, path: str) -> None:
    values = deepcopy(defaults())
    *above, last = path.split(".")
    holder = values
    for key in above:
        holder = holder[key]
    del holder[last]
    done = rendered(helm, tmp_path, values)
    if done.returncode:
        assert f"{path} is required" in done.stderr or f"{path}." in done.stderr
        assert "use --reset-then-reuse-values instead of --reuse-values" in done.stderr
    else:
        assert done.stdout == whole or path.startswith(MAY_BE_NONE) or last == "enabled"  # by default it is false


@pytest.mark.parametrize("path", ["controller.resources", "metrics.dashboard.labels", "image.tag", "policy.largestJob"])
def test_default_can_be_removed_with_null(helm: str, tmp_path: Path, path: str) -> None:
    values = tmp_path / "values.yaml"
    *above, last = path.split(".")
    nested: Values = {last: None}
    for key in reversed(above):
        nested = {key: nested}
    values.write_text(yaml.safe_dump(nested))
    chosen = ["--values", str(values), f"--set=image.repository={REPOSITORY},metrics.dashboard.enabled=true"]
    command = [helm, "template", "stage2", str(CHART), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = re.compile(rf"{PART}(\.{PART})*")
SERVICE = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")  # DNS-1035
EVERYTHING = [f"metrics.{part}.enabled=true" for part in PARTS]
LONG = "a" * 59
MOST = 63  # characters of a label's value, and of a Service's name


@pytest.mark.parametrize("release", ["stage2", "my.rel", "1a", f"{'r' * 52}s", f"1.{'r' * 50}s", "1"])
@pytest.mark.parametrize("more", [(), (f'nameOverride="{LONG}-b.c"',), (f'fullnameOverride="{LONG}---bcd"',)])
def test_object_names_and_labels_are_valid_for_long_or_odd_releases(
    template: Template, release: str, more: tuple[str, ...]
) -> None:
    namespace = "n" * 63
    wide = template(*EVERYTHING, *more, release=release, namespace=namespace)
    narrow = template(*EVERYTHING, *more, 'controller.namespaces=["team-a"]', release=release, namespace=namespace)
    for kind, name in [*wide, *narrow]:
        rule, most = (SERVICE, MOST) if kind == "Service" else (SUBDOMAIN, 253)
        assert rule.fullmatch(name), (kind, name)
        assert len(name) <= most, (kind, name)
    for labels in (one["metadata"].get("labels", {}) for one in wide.values()):
        assert all(len(value) <= MOST and value[-1:].isalnum() for value in labels.values()), labels


@pytest.mark.parametrize("release", ["stage2", "my.rel", "1a", "r" * 53])
def test_alert_queries_service_by_its_rendered_name(template: Template, release: str) -> None:
    made = template(*EVERYTHING, release=release)
    (service,) = (name for kind, name in made if kind == "Service")
    (rules,) = (one["spec"] for (kind, _), one in made.items() if kind == "PrometheusRule")
    assert f'job="{service}"' in yaml.safe_dump(rules, width=1000)


def test_long_release_names_get_distinct_cluster_roles(template: Template) -> None:
    def roles(release: str) -> set[str]:
        made = template('controller.namespaces=["team-a"]', release=release, namespace="n" * 63)
        return {name for kind, name in made if kind == "ClusterRole"}

    assert roles("stage2-a").isdisjoint(roles("stage2-b"))


@pytest.mark.parametrize("word", ["123", "1e3", "0x1f", "null", "true", "1.5"])
def test_name_that_looks_like_other_yaml_type_stays_text(template: Template, word: str) -> None:
    values = (f'fullnameOverride="{word}"', f'serviceAccount.name="{word}"', f'controller.priorityClassName="{word}"')
    for more in ((), (f'controller.namespaces=["{word}"]',) if word.isalnum() else ()):
        made = template(*EVERYTHING, *values, *more, namespace="123")
        for (kind, _), one in made.items():
            _only_text(one["metadata"], kind)
            _only_text(one.get("subjects", []), kind)
            _only_text(one.get("roleRef", {}), kind)
        assert ("Deployment", word) in made
        (pod,) = (one["spec"]["template"]["spec"] for (kind, _), one in made.items() if kind == "Deployment")
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == (word, word)
        (lease,) = (one["rules"][1] for (kind, name), one in made.items() if name.endswith("-lease") and kind == "Role")
        assert lease["resourceNames"] == [word]


def _only_text(value: object, kind: str) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _only_text(inner, kind)
    elif isinstance(value, list):
        for inner in value:
            _only_text(inner, kind)
    else:
        assert isinstance(value, str), (kind, value)


ROOT = Path(__file__).parents[3]

CRD = ("CustomResourceDefinition", "rolloutmatchingjobs.stage2.dev")


def controller_pod(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment", "stage2"]["spec"]["template"]["spec"]
    return spec


def test_helm_lint_reports_nothing(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_defaults_install_exactly_these_objects(template: Template) -> None:
    assert set(template()) == {
        CRD,
        ("ValidatingAdmissionPolicy", "rolloutmatchingjobs.stage2.dev"),
        ("ValidatingAdmissionPolicyBinding", "rolloutmatchingjobs.stage2.dev"),
        ("ValidatingAdmissionPolicy", "stage2-policy"),
        ("ValidatingAdmissionPolicyBinding", "stage2-policy"),
        ("ServiceAccount", "stage2"),
        ("ClusterRole", "stage2"),
        ("ClusterRoleBinding", "stage2"),
        ("Deployment", "stage2"),
        ("PodDisruptionBudget", "stage2"),
        ("NetworkPolicy", "stage2"),
        ("ClusterRole", "stage2-view"),
        ("ClusterRole", "stage2-edit"),
        ("ClusterRole", "stage2-admin"),
        ("Role", "stage2-lease"),
        ("RoleBinding", "stage2-lease"),
    }


def test_chart_has_files_and_no_links() -> None:
    assert [path.name for path in CHART.rglob("*") if path.is_symlink()] == []


def test_chart_ships_generated_crd(template: Template) -> None:
    generated = yaml.safe_load((ROOT / "crds" / "rolloutmatchingjob.yaml").read_text())
    assert template()[CRD]["spec"] == generated["spec"]


def test_admission_policy_for_unknown_keys_is_installed_with_crd(template: Template) -> None:
    name = "rolloutmatchingjobs.stage2.dev"
    generated = yaml.safe_load((ROOT / "crds" / "known-keys.yaml").read_text())
    assert template()["ValidatingAdmissionPolicy", name]["spec"] == generated["spec"]
    binding = template()["ValidatingAdmissionPolicyBinding", name]["spec"]
    assert binding == {"policyName": name, "validationActions": ["Deny"]}
    for value in ("crd.install=false", "crd.refuseUnknownKeys=false"):
        assert ("ValidatingAdmissionPolicy", name) not in template(value)


def test_crd_survives_uninstall_unless_keep_is_false(template: Template) -> None:
    assert template()[CRD]["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "annotations" not in template("crd.keep=false")[CRD]["metadata"]


def test_listed_namespaces_get_role_each_instead_of_cluster_role(template: Template) -> None:
    manifests = template(
        'controller.namespaces=["team-a","team-b"]', "controller.placement=false", "rbac.aggregate=false"
    )
    kinds = [kind for kind, _ in manifests]
    assert "ClusterRole" not in kinds
    assert "ClusterRoleBinding" not in kinds
    rules = template("controller.placement=false")["ClusterRole", "stage2"]["rules"]
    assert manifests["Role", "stage2"]["rules"] == rules
    arguments = controller_pod(manifests)["containers"][0]["args"]
    assert {"--namespace=team-a", "--namespace=team-b"} <= set(arguments)


def test_controller_of_listed_namespaces_still_sees_nodes_and_all_pods(template: Template) -> None:
    rules = template('controller.namespaces=["team-a"]')["ClusterRole", "stage2-system.stage2"]["rules"]
    found = {resource for rule in rules for resource in rule["resources"]}
    assert found == {"nodes", "pods", "priorityclasses"}


@pytest.mark.parametrize("word", ["true", "false"])
def test_nodes_may_come_value_is_passed_to_controller(template: Template, word: str) -> None:
    made = template(f"controller.nodesMayCome={word}")
    assert f"--nodes-may-come={word}" in controller_pod(made)["containers"][0]["args"]


def test_controller_may_neither_list_secrets_nor_modify_pods(template: Template) -> None:
    verbs = {
        resource: set(rule["verbs"])
        for rule in template()["ClusterRole", "stage2"]["rules"]
        for resource in rule["resources"]
    }
    assert verbs["secrets"] == {"get", "create", "delete"}
    assert verbs["pods"] == {"list", "watch"}
    assert "*" not in {verb for allowed in verbs.values() for verb in allowed}
    assert "*" not in verbs


def test_controller_pod_satisfies_restricted_pod_security(template: Template) -> None:
    pod = controller_pod(template())
    container = pod["containers"][0]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_pod_has_the_variables_volumes_and_contexts_that_values_name(template: Template) -> None:
    made = template(
        'controller.annotations={"reloader": "true"}',
        'controller.env=[{"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}]',
        'controller.envFrom=[{"secretRef": {"name": "proxy"}}]',
        'controller.volumes=[{"name": "ca", "configMap": {"name": "ca"}}]',
        'controller.volumeMounts=[{"name": "ca", "mountPath": "/ca"}]',
        'controller.podSecurityContext={"runAsUser": 7}',
        'controller.securityContext={"privileged": false}',
    )
    pod = controller_pod(made)
    container = pod["containers"][0]
    assert made["Deployment", "stage2"]["metadata"]["annotations"] == {"reloader": "true"}
    assert container["env"][-1] == {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}
    assert container["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert pod["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    assert container["volumeMounts"][-1] == {"name": "ca", "mountPath": "/ca"}
    assert pod["securityContext"]["runAsUser"] == 7
    assert container["securityContext"]["privileged"] is False


def test_probes_have_the_times_that_values_name(template: Template) -> None:
    container = controller_pod(template("controller.livenessProbe.failureThreshold=9"))["containers"][0]
    assert container["livenessProbe"] == {
        "httpGet": {"path": "/healthz", "port": "http"},
        "periodSeconds": 20,
        "timeoutSeconds": 5,  # by the clock: a value of the chart, nothing here waits for it
        "failureThreshold": 9,
    }
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_metrics_over_tls_are_probed_and_scraped_over_tls(template: Template) -> None:
    made = template(
        'metrics.tlsSecret="metrics"',
        "metrics.serviceMonitor.enabled=true",
        'metrics.serviceMonitor.tlsConfig={"serverName": "stage2"}',
    )
    pod = controller_pod(made)
    container = pod["containers"][0]
    (mounted,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "metrics-tls")
    assert f"--tls={mounted}" in container["args"]
    assert {"name": "metrics-tls", "secret": {"secretName": "metrics"}} in pod["volumes"]
    assert {container[f"{one}Probe"]["httpGet"]["scheme"] for one in ("startup", "liveness", "readiness")} == {"HTTPS"}
    (endpoint,) = made["ServiceMonitor", "stage2"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "stage2"})


def test_existing_service_account_must_be_named(template: Template) -> None:
    with pytest.raises(ValueError, match=r"serviceAccount\.name is required where serviceAccount\.create is false"):
        template("serviceAccount.create=false")
    made = template("serviceAccount.create=false", 'serviceAccount.name="theirs"')
    assert controller_pod(made)["serviceAccountName"] == "theirs"
    assert "ServiceAccount" not in {kind for kind, _ in made}


def test_chart_runs_two_controllers_with_leader_election(template: Template) -> None:
    manifests = template()
    assert manifests["Deployment", "stage2"]["spec"]["replicas"] == 2
    assert "--lease=stage2-system/stage2" in controller_pod(manifests)["containers"][0]["args"]
    update = manifests["Role", "stage2-lease"]["rules"][1]
    assert (update["resourceNames"], update["verbs"]) == (["stage2"], ["get", "update"])


def test_rights_on_kueue_workloads_require_kueue_value(template: Template) -> None:
    def groups(manifests: dict[tuple[str, str], dict[str, Any]]) -> set[str]:
        return {group for rule in manifests["ClusterRole", "stage2"]["rules"] for group in rule["apiGroups"]}

    with_kueue = template("controller.kueue=true")
    assert "kueue.x-k8s.io" not in groups(template())
    assert "kueue.x-k8s.io" in groups(with_kueue)
    assert "--kueue" in controller_pod(with_kueue)["containers"][0]["args"]


@pytest.mark.parametrize("namespaces", ["[]", '["team-a"]'])
def test_controller_lists_only_core_events(template: Template, namespaces: str) -> None:
    manifests = template(f"controller.namespaces={namespaces}")
    rules = [rule for body in manifests.values() for rule in body.get("rules") or () if "events" in rule["resources"]]
    assert {(*rule["apiGroups"], *rule["resources"], *rule["verbs"]) for rule in rules} == {
        ("", "events", "get", "list", "create", "patch")
    }


def test_kueue_flavors_are_readable_even_with_listed_namespaces(template: Template) -> None:
    manifests = template('controller.namespaces=["team-a"]', "controller.placement=false", "controller.kueue=true")
    read = {
        "apiGroups": ["kueue.x-k8s.io"],
        "resources": ["resourceflavors", "workloadpriorityclasses"],
        "verbs": ["get"],
    }
    assert manifests["ClusterRole", "stage2-system.stage2"]["rules"] == [read]
    assert read in template("controller.kueue=true")["ClusterRole", "stage2"]["rules"]
    assert read not in template()["ClusterRole", "stage2"]["rules"]


def test_service_monitor_is_rendered_when_enabled(template: Template) -> None:
    monitored = template("metrics.serviceMonitor.enabled=true", 'metrics.serviceMonitor.labels={"release":"p"}')
    assert monitored["ServiceMonitor", "stage2"]["metadata"]["labels"]["release"] == "p"
    service = monitored["Service", "stage2-metrics"]
    assert service["spec"]["ports"][0]["targetPort"] == controller_pod(monitored)["containers"][0]["ports"][0]["name"]


def test_pod_monitor_selects_learners_at_their_metrics_port(template: Template) -> None:
    monitor = template("metrics.podMonitor.enabled=true")["PodMonitor", "stage2-learners"]["spec"]
    raw = yaml.safe_load((ROOT / "examples" / "job-3v1.yaml").read_text())
    (learner,) = [child for child in static_children(parse_job(raw)) if child["kind"] == "Job"]
    pod = learner["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    assert monitor["podMetricsEndpoints"][0]["port"] in ports
    assert monitor["namespaceSelector"] == {"any": True}


DIGEST = "other.example/x@sha256:0"


@pytest.mark.parametrize(
    ("values", "controller", "trainer"),
    [
        ([], f"{REPOSITORY}/controller:{VERSION}", f"{REPOSITORY}/trainer:{VERSION}"),
        (['image.repository="a/b/"', 'image.tag="dev"'], "a/b/controller:dev", "a/b/trainer:dev"),
        ([f'image.trainer="{DIGEST}"'], f"{REPOSITORY}/controller:{VERSION}", DIGEST),
        (['image.repository=""', 'image.controller="a"', f'image.trainer="{DIGEST}"'], "a", DIGEST),
    ],
)
def test_image_repository_sets_registry_of_both_images(
    template: Template, values: list[str], controller: str, trainer: str
) -> None:
    container = controller_pod(template(*values))["containers"][0]
    assert container["image"] == controller
    assert {"name": "STAGE2_DEFAULT_IMAGE", "value": trainer} in container["env"]


@pytest.mark.parametrize("values", [(), ('image.controller="a"',), ('image.trainer="a"',)])
def test_missing_image_repository_is_refused_with_instructions(template: Template, values: tuple[str, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"image\.repository is required; set it to .*docker build .*docker push .*--set image\.r"
    ):
        template('image.repository=""', *values)


def test_registry_with_scheme_is_refused_with_correction(template: Template) -> None:
    with pytest.raises(ValueError, match=r"image\.repository: https://a/b: must .* without a scheme; write a/b"):
        template('image.repository="https://a/b"')


def test_controller_arguments_are_known_options(template: Template) -> None:
    from stage2_controller.loop.main import _parser

    arguments = controller_pod(template('controller.namespaces=["a"]'))["containers"][0]["args"]
    options = _parser().parse_args(arguments)
    assert (options.namespace, options.concurrency, options.log_level) == (["a"], 8, "info")


def test_large_numbers_are_rendered_as_integers(template: Template) -> None:
    """Helm has every number of a values file as a float, and prints a million as 1e+06, which is no integer."""
    manifests = template(
        "controller.concurrency=1000",
        "controller.replicas=1000000",
        "controller.progressSeconds=1000000",
        "policy.longestStartSeconds=2147483647",
        'policy.largestJob={"*": 100000}',
        'controller.tolerations=[{"operator": "Exists", "tolerationSeconds": 1000000}]',
    )
    assert manifests["Deployment", "stage2"]["spec"]["replicas"] == 1000000
    pod = controller_pod(manifests)
    assert pod["tolerations"][0]["tolerationSeconds"] == 1000000
    container = pod["containers"][0]
    reported = {"--concurrency=1000", "--progress-seconds=1000000"}
    assert reported <= set(container["args"])
    (policy,) = [one["value"] for one in container["env"] if one["name"] == "STAGE2_POLICY"]
    assert '"longestStartSeconds":2147483647' in policy
    assert '"largestJob":{"*":100000}' in policy
    text = yaml.safe_dump(manifests["ValidatingAdmissionPolicy", "stage2-policy"], width=10000)
    assert '{"*":100000}' in text


REFUSED = {
    "names that the API server refuses": [
        'nameOverride="My_Name"',
        'fullnameOverride="-a"',
        'fullnameOverride="a..b"',
        'serviceAccount.name="My_Name"',
        'controller.namespaces=["Team_A"]',
        'controller.namespaces=["team.a"]',
        f'controller.namespaces=["{"n" * 64}"]',
        'controller.priorityClassName="High"',
    ],
    "numbers beyond all sense": [
        "controller.concurrency=0",
        "controller.concurrency=1001",
        "controller.replicas=2147483648",
        "controller.progressSeconds=1e10",
    ],
    "root's group": ["policy.groups=[0]", 'policy.groups=["0"]'],
    "what means nothing": ['controller.logLevel="loud"', "contoller={}", "policy.hostpaths=[]"],
    "paths that mean something else": [
        *(
            'policy.hostPaths=["data"]',
            'policy.hostPaths=["/a/../b"]',
            'policy.hostPaths=["/a//b"]',
            'policy.hostPaths=["/"]',
        ),
        *('policy.writableHostPaths=["data"]', 'policy.nfs=["/export"]', 'policy.nfs=["a.example:/a/../b"]'),
    ],
}


@pytest.mark.parametrize("value", [value for values in REFUSED.values() for value in values])
def test_invalid_values_are_refused_by_schema(template: Template, value: str) -> None:
    with pytest.raises(ValueError, match="values don't meet the specifications"):
        template(value)


READ = {"get", "list", "watch"}
WRITE = {"create", "update", "patch", "delete"}
SCALE = {"get", "update", "patch"}


@pytest.mark.parametrize(
    ("role", "verbs"), [("view", READ), ("edit", READ | WRITE), ("admin", READ | WRITE | {"deletecollection"})]
)
def test_namespace_roles_include_rights_on_jobs(template: Template, role: str, verbs: set[str]) -> None:
    made = template()["ClusterRole", f"stage2-{role}"]
    assert made["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
    rule, scale = made["rules"]
    assert (scale["resources"], set(scale["verbs"])) == (["rolloutmatchingjobs/scale"], verbs & SCALE)
    assert (rule["apiGroups"], rule["resources"]) == (["stage2.dev"], ["rolloutmatchingjobs"])
    assert set(rule["verbs"]) == verbs
    grants = made["metadata"]["annotations"]["stage2.dev/grants"]
    assert ("runs programs" in grants) is ("create" in verbs)
    assert ("Deletes all" in grants) is ("deletecollection" in verbs)


def test_rights_on_jobs_are_not_aggregated_when_turned_off(template: Template) -> None:
    assert ("ClusterRole", "stage2-edit") not in template("rbac.aggregate=false")


@pytest.mark.parametrize(
    "value", ['nameOverride="trainer"', 'fullnameOverride="other"', 'controller.podLabels={"stage2.dev/role":"b"}']
)
def test_controller_labels_do_not_depend_on_its_name(template: Template, value: str) -> None:
    (deployment,) = [made for (kind, _), made in template(value).items() if kind == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert CONTROLLER_LABELS.items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_same_release_name_in_two_namespaces_shares_no_object(template: Template) -> None:
    one = template('controller.namespaces=["team-a"]', namespace="a-system")
    other = template('controller.namespaces=["team-b"]', "crd.install=false", namespace="b-system")
    assert not _places(one) & _places(other)
    assert CRD in one
    assert CRD not in other


def test_cluster_scoped_names_of_two_releases_never_collide(template: Template) -> None:
    """`team` with `x-stage2`, and `team-x` with `stage2`: only a character that no namespace has keeps them apart."""
    one = template('controller.namespaces=["team-a"]', release="x-stage2", namespace="team")
    other = template('controller.namespaces=["team-b"]', "crd.install=false", release="stage2", namespace="team-x")
    assert not _places(one) & _places(other)
    assert ("ClusterRole", "team.x-stage2") in one
    assert ("ClusterRole", "team-x.stage2-view") in other


def _places(manifests: Manifests) -> set[tuple[str, str | None, str]]:
    return {(kind, made["metadata"].get("namespace"), name) for (kind, name), made in manifests.items()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_pod_disruption_budget_lets_drain_evict_single_controller(template: Template, replicas: int) -> None:
    manifests = template(f"controller.replicas={replicas}")
    budget = manifests["PodDisruptionBudget", "stage2"]["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert budget["selector"] == manifests["Deployment", "stage2"]["spec"]["selector"]
    assert ("PodDisruptionBudget", "stage2") not in template("controller.podDisruptionBudget=false")


def test_only_controller_metrics_may_set_namespace_label(template: Template) -> None:
    manifests = template("metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true")
    (of_controller,) = manifests["ServiceMonitor", "stage2"]["spec"]["endpoints"]
    (of_learners,) = manifests["PodMonitor", "stage2-learners"]["spec"]["podMetricsEndpoints"]
    assert of_controller["honorLabels"] is True
    assert of_learners["honorLabels"] is False


def test_only_metrics_and_health_port_of_controller_is_reachable(template: Template) -> None:
    manifests = template()
    policy = manifests["NetworkPolicy", "stage2"]["spec"]
    (container,) = manifests["Deployment", "stage2"]["spec"]["template"]["spec"]["containers"]
    assert policy["podSelector"] == manifests["Deployment", "stage2"]["spec"]["selector"]
    assert policy["ingress"] == [{"ports": [{"port": container["ports"][0]["name"]}]}]
    assert policy["egress"] == [{}]
    assert ("NetworkPolicy", "stage2") not in template("controller.networkPolicy=false")


OLDER: list[tuple[Values, str]] = [
    (
        {
            "image": {"repository": "mirror.example/ops/controller", "tag": "0.0.9"},
            "workloadImage": {"repository": "mirror.example/ops/trainer", "tag": "0.0.9"},
        },
        "workloadImage: mirror.example/ops/trainer:0.0.9; ",
    ),
    ({"image": {"repository": "mirror.example/ops"}, "workloadImage": {"tag": "x"}}, "workloadImage: "),
    ({"image": {"repository": "mirror.example/ops/controller"}}, "image.repository: mirror.example/ops/controller; "),
    (
        {"image": {"repository": "mirror.example/ops"}, "controller": {"patienceSeconds": 60}},
        "controller.patienceSeconds: 60; ",
    ),
]


@pytest.mark.parametrize(("values", "words"), OLDER)
def test_values_of_older_charts_are_refused_with_replacement_options(
    helm: str, tmp_path: Path, values: Values, words: str
) -> None:
    """Helm said that workloadImage is not allowed, and the documented upgrade ended there."""
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(values))
    command = [helm, "template", "stage2", str(CHART), f"--values={tmp_path / 'older.yaml'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert words in done.stderr
    advised = [option.rstrip(",;") for option in re.findall(r"--set (\S+)", done.stderr)]
    if not advised:
        _, _, folder = done.stderr.partition(": write ")
        advised = [f"image.repository={folder.partition(',')[0]}"]
    upgraded = subprocess.run([*command, f"--set={advised[-1]}"], capture_output=True, text=True, check=False)
    assert upgraded.returncode == 0, upgraded.stderr
    for part in ("controller", "trainer"):
        assert "mirror.example/ops" not in str(values.get("workloadImage")) or f"ops/{part}:0.0.9" in upgraded.stdout

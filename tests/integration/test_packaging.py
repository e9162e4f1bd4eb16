"""What contrib/ has for containers, systemd, Kubernetes, Prometheus and Grafana names what is there.

Each file is read by a parser of its own kind; flags are checked by the tables of the daemons, metrics by what daemons
answer, manifests by Kubernetes' schemas. Where systemd, promtool, or docker with compose is there, it is asked as well.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.integration.daemons import PATIENCE_S, Cluster, running_cluster

from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import Options
from flintmq.options.resolve import resolve

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"
ROOT = CONTRIB.parent
TABLES: dict[str, type[Options]] = {"nsqd": NsqdOptions, "nsqlookupd": NsqlookupdOptions, "nsqadmin": NsqadminOptions}
COMPOSED = ["docker/compose.yaml", "cluster/compose.yaml"]
MANIFESTS = ["etcd.yaml", "nsqlookupd.yaml", "nsqd.yaml", "nsqadmin.yaml"]
UNITS = ["nsqd", "nsqlookupd", "nsqadmin"]
PORTS = {"nsqd": 4151, "nsqlookupd": 4161, "nsqadmin": 4171}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((CONTRIB / name).read_text()))


def check_flags(words: list[str], variables: dict[str, str] | None = None) -> str:
    """Have a daemon take its command line; return which one it is."""
    program, *flags = words
    assert resolve(TABLES[program], flags, variables or {}).action == "run"
    return program


# -- containers --------------------------------------------------------------------------------------------------------


def test_the_image_runs_as_nobody_in_particular_and_says_whether_it_is_well():
    text = (CONTRIB / "docker/Dockerfile").read_text().replace("\\\n", " ")
    parts = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    lines = [(word, rest) for word, _, rest in parts]
    said = dict(lines)
    final = dict(lines[max(index for index, (word, _) in enumerate(lines) if word == "FROM") :])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", final["USER"])
    assert said["VOLUME"] == "/data" and said["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(said["ENTRYPOINT"]) == ["flintmq"]
    assert check_flags(json.loads(said["CMD"])) == "nsqd"
    assert said["EXPOSE"].split() == ["4150", "4151", "4153", "4160", "4161", "4171"]
    command = json.loads(said["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["python", "-c"] and "HEALTH_URL" in said["ENV"]
    compile(command[2], "HEALTHCHECK", "exec")
    for word, rest in lines:
        if word == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest


@pytest.mark.slow
def test_the_image_is_built_of_what_is_copied_into_it(tmp_path: Path):
    """The first stage by hand: the wheel that comes of it has the pages of nsqadmin, and every command."""
    source, wheels = tmp_path / "src", tmp_path / "wheels"
    source.mkdir()
    lines = (CONTRIB / "docker/Dockerfile").read_text().partition("\nRUN pip wheel")[0].splitlines()
    for line in lines:
        if line.startswith("COPY "):
            *copied, target = line.split()[1:]
            for name in copied:
                if (ROOT / name).is_dir():
                    leave = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / name, source / target, ignore=leave)
                else:
                    shutil.copy(ROOT / name, source / target)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), "."]
    subprocess.run(command, cwd=source, check=True, timeout=PATIENCE_S)
    (wheel,) = wheels.glob("flintmq-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        found = {name: opened.read(name) for name in opened.namelist() if name.endswith("entry_points.txt")}
        names = set(opened.namelist())
    (entries,) = found.values()
    assert {line.split(" = ")[0] for line in entries.decode().splitlines() if " = " in line} >= {
        "flintmq", "nsqd", "nsqlookupd", "nsqadmin", "nsq_to_file", "to_nsq",
    }  # fmt: skip
    package = ROOT / "src/flintmq/nsqadmin"
    for kind in ("static", "templates"):
        there = {f"flintmq/nsqadmin/{path.relative_to(package)}" for path in (package / kind).rglob("*.*")}
        assert there and there <= names


def test_the_health_check_of_the_image_tells_a_daemon_from_none(cluster: Cluster):
    text = (CONTRIB / "docker/Dockerfile").read_text()
    (code,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', text)
    host, port = cluster.nodes[0].http
    for url, expected in ((f"http://{host}:{port}/ping", 0), (f"http://{host}:{port}/none", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"HEALTH_URL": url}, capture_output=True, timeout=PATIENCE_S
        )
        assert done.returncode == expected


@pytest.mark.parametrize("name", COMPOSED)
def test_a_compose_file_is_complete(name: str):
    (found,) = documents(name)
    services, volumes = found["services"], found["volumes"]
    ours = []
    for service, what in services.items():
        assert "image" in what and (":" in what["image"] or what["image"] == "flintmq"), service
        if what["image"] == "flintmq":
            assert (CONTRIB / name).parent.joinpath(what["build"]["context"], what["build"]["dockerfile"]).exists()
            program = check_flags(what["command"])
            ours.append(program)
            url = what.get("environment", {}).get("HEALTH_URL", "http://127.0.0.1:4151/ping")
            assert url == f"http://127.0.0.1:{PORTS[program]}/ping"
        for volume in what.get("volumes", ()):
            source = volume.split(":")[0]
            assert (CONTRIB / name).parent.joinpath(source).is_file() if source[0] == "." else source in volumes, volume
        for port in what.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{service} would listen on every address"
        named = re.findall(r"(?:address|store)=(?:http://)?([a-z][\w-]*)(?::|$)", " ".join(what.get("command", ())))
        assert set(named) <= services.keys()
        assert set(what.get("depends_on", ())) <= services.keys()
    assert ours.count("nsqd") == (1 if name.startswith("docker") else 3) and ours.count("nsqadmin") == 1


@pytest.mark.parametrize("name", COMPOSED)
def test_prometheus_asks_every_daemon_of_a_compose_file(name: str):
    (found,) = documents(name)
    (asked,) = documents(str(Path(name).with_name("prometheus.yaml")))
    targets = {
        target for job in asked["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    }
    daemons = {
        f"{service}:{PORTS[what['command'][0]]}"
        for service, what in found["services"].items()
        if what["image"] == "flintmq" and what["command"][0] != "nsqadmin"  # which has no figures of its own
    }
    assert targets == daemons


@pytest.mark.parametrize("name", COMPOSED)
def test_docker_takes_a_compose_file(name: str):
    command = ["docker", "compose"]
    if not shutil.which("docker") or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("needs docker with compose")
    subprocess.run([*command, "-f", str(CONTRIB / name), "config", "--quiet"], check=True, timeout=PATIENCE_S)


# -- systemd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", UNITS)
def test_a_unit_starts_a_daemon_that_takes_its_flags_and_variables(program: str):
    text = (CONTRIB / f"systemd/{program}.service").read_text()
    found = re.search(r"^ExecStart=/opt/flintmq/bin/(.*)$", text, re.MULTILINE)
    assert found is not None
    variables = dict(
        re.findall(r"^#   (FLINTMQ_\w+)=(\S+)$", text, re.MULTILINE)[: 3 if program == "nsqlookupd" else 9]
    )
    assert len(variables) > 1
    if program == "nsqlookupd":
        variables["FLINTMQ_NSQLOOKUPD_CLUSTER_STORE"] = "own"
    assert check_flags(shlex.split(found[1]), variables) == program
    assert "\nStartLimitIntervalSec=0\n" in text, "what passes, as a full disk, does not leave it down for good"
    assert "\nType=notify\n" in text, "and tests/integration/test_supervisor.py shows that it tells"


@pytest.mark.parametrize("program", UNITS)
def test_systemd_takes_a_unit(program: str, tmp_path: Path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    here = Path(sys.executable).parent / program
    text = (CONTRIB / f"systemd/{program}.service").read_text()
    unit = tmp_path / f"{program}.service"
    unit.write_text(text.replace(f"/opt/flintmq/bin/{program}", str(here)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=PATIENCE_S)
    about = [line for line in done.stderr.splitlines() if str(unit) in line]
    assert done.returncode == 0 and not about, done.stderr


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def objects(kind: str) -> Iterator[Any]:
    for name in MANIFESTS:
        yield from (each for each in documents(f"kubernetes/{name}") if each["kind"] == kind)


def workloads() -> Iterator[Any]:
    yield from objects("StatefulSet")
    yield from objects("Deployment")


def test_kubernetes_starts_daemons_that_take_their_flags():
    programs = []
    for each in workloads():
        (container,) = each["spec"]["template"]["spec"]["containers"]
        if "args" in container:
            line = "\n".join(container["args"])
            for variable in container.get("env", ()):
                line = line.replace(f"$({variable['name']})", "pod-0")
            assert "$(" not in line, "a variable that it has not"
            programs.append(check_flags(line.split("\n")))
    assert programs == ["nsqlookupd", "nsqd", "nsqadmin"]


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_takes_the_manifests(version: str):
    """By the schemas of its API, as strict as the server: a field that it does not know is an error."""
    for name in MANIFESTS:
        for each in documents(f"kubernetes/{name}"):
            kubernetes_validate.validate(each, version, strict=True)


def test_what_the_manifests_name_is_there():
    services = {each["metadata"]["name"]: each["spec"] for each in objects("Service")}
    for each in workloads():
        name, spec = each["metadata"]["name"], each["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == services[spec.get("serviceName", name)]["selector"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {port["name"]: port["port"] for port in services[name]["ports"]} == ports
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                ((_, asked),) = ((kind, what) for kind, what in container[probe].items() if isinstance(what, dict))
                assert asked["port"] in ports
        volumes = [volume["name"] for volume in pod.get("volumes", ())]
        volumes += [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())]
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == set(volumes)
        words = " ".join(container.get("args", ()))
        for host, port in re.findall(r"=(?:http://)?([a-z][\w.-]*):(\d+)", words):
            pod_name, _, of = host.rpartition(".")
            assert int(port) in {each["port"] for each in services[of]["ports"]}
            if pod_name:
                known = [f"{of}-{number}" for number in range(2)]
                assert pod_name in known
        assert ":" in container["image"]


def test_what_clients_are_told_has_the_namespace():
    """The name of a pod alone is found in its own namespace and in no other."""
    told = [word for each in workloads() for word in each["spec"]["template"]["spec"]["containers"][0].get("args", ())]
    assert [word for word in told if word.startswith("--broadcast-address=")] == [
        f"--broadcast-address=$(POD_NAME).{name}.$(POD_NAMESPACE).svc" for name in ("nsqlookupd", "nsqd")
    ]


def test_pods_are_not_root_and_may_do_nothing_else():
    for each in workloads():
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            bound = container["securityContext"]
            assert not bound["allowPrivilegeEscalation"] and bound["readOnlyRootFilesystem"]
            assert bound["capabilities"] == {"drop": ["ALL"]} and "memory" in container["resources"]["limits"]


# -- Prometheus and Grafana --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ["--e2e-processing-latency-percentile=0.99"]
    with running_cluster(tmp_path_factory.mktemp("packaging"), copies_on=1, flags=flags) as found:
        found.create("t", copies=1)
        yield found


@pytest.fixture(scope="module")
def metrics(cluster: Cluster) -> dict[str, set[str]]:
    """What both daemons answer: the labels of each metric."""
    node = cluster.leader("t")
    with node.connect() as connection:
        node.publish("t", b"x")
        connection.ok(b"SUB t ch\n")
        connection.rdy(1)
        connection.finish(connection.message())
        connection.settle()
        found: dict[str, set[str]] = {"up": {"job", "instance"}}
        for daemon in (node, cluster.nsqlookupd):
            for line in daemon.request("GET", "/metrics").text.splitlines():
                if sample := re.match(r"(\w+)(?:\{(.*)\})? ", line):
                    labels = re.findall(r'(\w+)="', sample[2] or "")
                    found.setdefault(sample[1], {"job", "instance"}).update(labels)
                elif line.startswith("# TYPE "):
                    found.setdefault(line.split()[2], {"job", "instance"})
    return found


def expressions(value: Any, key: str = "") -> Iterable[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from expressions(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from expressions(each, key)
    elif key in ("expr", "query") and isinstance(value, str):
        yield value


def check_metrics(texts: Iterable[str], metrics: dict[str, set[str]]) -> int:
    count = 0
    for text in texts:
        named = re.findall(r"\b((?:flintmq|process)_\w+|up)\b(?:\{([^}]*)\})?", text)
        for name, matchers in named:
            assert name in metrics, f"{name} in {text}"
            labels = set(re.findall(r"(\w+)=~?\"", matchers))
            assert labels <= metrics[name], f"{labels - metrics[name]} of {name} in {text}"
            count += 1
        grouped = re.findall(r"\bby \(([^)]*)\)", text)
        for label in {label.strip() for each in grouped for label in each.split(",")}:
            assert any(label in metrics[name] for name, _ in named), f"{label} in {text}"
    return count


def test_the_dashboard_shows_metrics_that_there_are(metrics: dict[str, set[str]]):
    board = json.loads((CONTRIB / "monitoring/dashboard.json").read_text())
    assert check_metrics(expressions(board), metrics) > 30
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__rate_interval"}
    assert used == variables
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]


def test_the_alerts_look_at_metrics_that_there_are(metrics: dict[str, set[str]]):
    (rules,) = documents("monitoring/alerts.yaml")
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert check_metrics((rule["expr"] for rule in alerts), metrics) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            (first, *_) = re.findall(r"(?:flintmq_\w+|up)", rule["expr"])
            assert label in metrics[first], rule["alert"]


def panel_query(title: str, legend: str) -> str:
    """A query of the dashboard, for all nsqds."""
    board = json.loads((CONTRIB / "monitoring/dashboard.json").read_text())
    targets = [target for panel in board["panels"] if panel["title"] == title for target in panel["targets"]]
    (found,) = (target["expr"] for target in targets if target["legendFormat"] == legend)
    return str(found).replace("$instance", ".*")


def test_how_many_nsqds_there_are_is_not_asked_of_those_that_live():
    """A dead one has no figures of its own: it is known by what Prometheus asks."""
    assert re.match(r"count\(up\{", panel_query("nsqd that are healthy", "known"))


@pytest.mark.parametrize("name", COMPOSED)
def test_rules_and_queries_are_about_jobs_that_there_are(name: str):
    (asked,) = documents(str(Path(name).with_name("prometheus.yaml")))
    jobs = {job["job_name"] for job in asked["scrape_configs"]}
    for text in ((CONTRIB / f"monitoring/{each}").read_text() for each in ("alerts.yaml", "dashboard.json")):
        named = set(re.findall(r'\bjob=\\?"(\w+)', text))
        assert named and named <= jobs
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^  - job_name: (\w+)$", page, re.MULTILINE)) == jobs


def test_a_topic_has_a_depth_of_its_own_until_it_has_a_channel(cluster: Cluster):
    """On that the alert about topics without channels relies."""
    (rules,) = documents("monitoring/alerts.yaml")
    (alert,) = (rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == "TopicWithoutChannel")
    assert alert["expr"].startswith("flintmq_nsqd_topic_depth{")
    cluster.create("alone", copies=1)
    node = cluster.leader("alone")
    node.publish("alone", b"x", b"y")
    metric = 'flintmq_nsqd_topic_depth{topic="alone"} '
    assert f"\n{metric}2\n" in node.request("GET", "/metrics").text
    node.post("/channel/create?topic=alone&channel=c")
    node.wait_given("alone")
    assert f"\n{metric}0\n" in node.request("GET", "/metrics").text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus")
def test_prometheus_takes_rules_queries_and_configurations(tmp_path: Path):
    """The dashboard's queries as rules, with a time for what Grafana puts in."""
    board = json.loads((CONTRIB / "monitoring/dashboard.json").read_text())
    texts = [
        text.replace("$__rate_interval", "5m") for text in expressions(board) if not text.startswith("label_values(")
    ]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    queries = tmp_path / "queries.yaml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", CONTRIB / "monitoring/alerts.yaml", queries], check=True)
    for name in COMPOSED:
        path = (CONTRIB / name).with_name("prometheus.yaml")
        subprocess.run(["promtool", "check", "config", "--syntax-only", path], check=True)


FOLLOWS = "and on(instance, job) flintmq_nsqlookupd_cluster_store_followed == 1"


def test_figures_of_a_nsqlookupd_without_the_store_count_for_nothing():
    """It goes on saying what was so when it lost the store; whether there is a master it says truly."""
    (rules,) = documents("monitoring/alerts.yaml")
    board = json.loads((CONTRIB / "monitoring/dashboard.json").read_text())
    found = [
        each
        for text in [*expressions(rules), *expressions(board), (CONTRIB.parent / "docs/monitoring.md").read_text()]
        for each in re.findall(r"max\((flintmq_nsqlookupd_cluster_[^)]*\)?[^)]*)\)", " ".join(text.split()))
        if not each.startswith("flintmq_nsqlookupd_cluster_has_master")
    ]
    assert len(found) > 10
    assert [each for each in found if not each.endswith(FOLLOWS)] == []


CUT = ["lookupd-1:4161", "lookupd-2:4161"]


def query_case(title: str, query: str, value: int | None, series: dict[str, str], lasts_m: int = 15) -> dict[str, Any]:
    """A case for promtool: what was scraped for so many minutes, and the one value of a query then, or none."""
    return {
        "name": title,
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{value}+0x{lasts_m + 5}"} for name, value in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": f"{lasts_m}m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
        ],
    }


def rule_case(title: str, fires: str, series: dict[str, str], lasts_m: int = 15) -> dict[str, Any]:
    """A case for promtool: what was scraped for so many minutes, and which alert fires (or does not, after a "!")."""
    query = f'count(ALERTS{{alertname="{fires.lstrip("!")}", alertstate="firing"}})'
    return query_case(title, query, None if fires.startswith("!") else 1, series, lasts_m)


def of_topic(depth: int, paused: int = 0, topic: str = "t") -> dict[str, str]:
    """The series of a topic of one nsqd."""
    labels = f'{{instance="a", job="nsqd", topic="{topic}"}}'
    return {f"flintmq_nsqd_topic_depth{labels}": str(depth), f"flintmq_nsqd_topic_paused{labels}": str(paused)}


def of_lookupd(name: str, *values: str, job: str = "nsqlookupd") -> dict[str, str]:
    """The series of a metric of as many nsqlookupds as values."""
    return {f'{name}{{instance="{CUT[at]}", job="{job}"}}': value for at, value in enumerate(values)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus")
def test_alerts_fire_for_what_is_so_and_not_for_what_was(tmp_path: Path):
    followed, stale = "flintmq_nsqlookupd_cluster_store_followed", "flintmq_nsqlookupd_cluster_partitions_not_writable"
    master, lease = "flintmq_nsqlookupd_cluster_has_master", 'flintmq_nsqd_cluster_lease_held{instance="a", job="nsqd"}'
    unwritable = 'flintmq_nsqd_not_writable{instance="a", job="nsqd"}'
    cases = [
        rule_case("one is cut off, and all is well", "!PartitionsNotWritable", of_lookupd(followed, "1", "0")
                  | of_lookupd(stale, "0", "3")),
        rule_case("one is cut off, and it is so", "PartitionsNotWritable", of_lookupd(followed, "0", "1")
                  | of_lookupd(stale, "0", "3")),
        rule_case("the store is full", "StoreTakesNoWrites", of_lookupd(followed, "1", "1")
                  | of_lookupd("flintmq_nsqlookupd_cluster_store_read_only", "0", "1")),
        rule_case("the store is not full", "!StoreTakesNoWrites", of_lookupd(followed, "1", "1")
                  | of_lookupd("flintmq_nsqlookupd_cluster_store_read_only", "0", "0")),
        rule_case("all are cut off", "NoMaster", of_lookupd(followed, "0", "0") | of_lookupd(master, "0", "0")),
        rule_case("one is cut off, the other knows the master", "!NoMaster", of_lookupd(master, "0", "1")),
        rule_case("none answers", "NoMaster", {lease: "0"}),
        rule_case("none answers, the store is nsqd's still", "NoMaster", {lease: "1"}),
        rule_case("there is no cluster", "!NoMaster", {"up": "1"}),
        rule_case("a node has lost its lease", "NsqdWithoutLease", of_lookupd(followed, "1", "0") | {lease: "0"}),
        rule_case("it loses it over and over", "NsqdWithoutLease", of_lookupd(followed, "1", "1")
                  | {lease: "1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0"}),
        rule_case("it has it", "!NsqdWithoutLease", of_lookupd(followed, "1", "1") | {lease: "1"}),
        rule_case("the store is away", "!NsqdWithoutLease", of_lookupd(followed, "0", "0") | {lease: "0"}),
        rule_case("it is in no cluster", "!NsqdWithoutLease", {"up": "1"}),
        rule_case("a leader has too few copies", "LeaderNotWritable", {unwritable: "2"}),
        rule_case("all can be written to", "!LeaderNotWritable", {unwritable: "0"}),
        rule_case("one is down", "NsqlookupdDown", of_lookupd("up", "1", "0")),
        rule_case("none is down", "!NsqlookupdDown", of_lookupd("up", "1", "1")),
        rule_case("a topic has no channel", "TopicWithoutChannel", of_topic(3), 65),
        rule_case("it has none yet", "!TopicWithoutChannel", of_topic(3), 30),
        rule_case("its channels have all", "!TopicWithoutChannel", of_topic(0), 65),
        rule_case("it is paused", "!TopicWithoutChannel", of_topic(3, paused=1), 65),
        rule_case("its messages are not kept", "!TopicWithoutChannel", of_topic(3, topic="t#ephemeral"), 65),
        *(
            query_case(f"one of three is dead: {name}", panel_query("nsqd that are healthy", name), value, {
                **{f'up{{instance="{each}", job="nsqd"}}': str(int(each != "c")) for each in "abc"},
                **{f'flintmq_nsqd_healthy{{instance="{each}", job="nsqd"}}': "1" for each in "ab"},
            })
            for name, value in (("healthy", 2), ("known", 3))
        ),
    ]  # fmt: skip
    written = tmp_path / "cases.yaml"
    rules = str(CONTRIB / "monitoring/alerts.yaml")
    written.write_text(yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "1m", "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", written], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_is_given_what_compose_mounts():
    (providers,) = documents("monitoring/dashboards.yaml")
    (sources,) = documents("monitoring/grafana.yaml")
    path = providers["providers"][0]["options"]["path"]
    for name in COMPOSED:
        (found,) = documents(name)
        mounted = [volume.split(":")[1] for volume in found["services"]["grafana"]["volumes"]]
        assert any(target.startswith(f"{path}/") for target in mounted)
        assert "prometheus" in found["services"]
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"

"""The dashboard and the alert rules of docs/monitoring use figures that /metrics has."""

import http.client
import json
import re
from pathlib import Path

import phalanx
import promql_parser as promql
import pytest
import yaml
from phalanx.rank.server import tls
from phalanx.rank.server.http.routes import paths
from prometheus_client.parser import text_string_to_metric_families

from ....certificates import make_certificate
from ....fields import each

DOCS = Path(phalanx.__file__).resolve().parent / "docs"
DASHBOARD = json.loads((DOCS / "monitoring/dashboard.json").read_text())
RULES = yaml.safe_load((DOCS / "monitoring/alerts.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"job", "instance"}  # labels that it adds to what it reads
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Grafana's variables, as values that PromQL can be parsed with.
VARIABLES = {"$__rate_interval": "1m", "$instance": "a"}


def expressions():
    for alert in ALERTS:
        yield pytest.param(alert["expr"], id=alert["alert"])
    for panel in PANELS:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")


def parsed(text):
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    assert "$" not in text, text
    return promql.parse(text)


def nodes(expression):
    found = []
    promql.walk(expression, lambda node: found.append(node))
    return found


@pytest.fixture(scope="module")
def exposed(make_server, tmp_path_factory):
    """The labels of each metric in /metrics of a server that has answered and failed to."""
    folder = tmp_path_factory.mktemp("monitoring")
    cert, key = make_certificate(folder / "tls")
    server = make_server(tls_cert=cert, tls_key=key, file_store=str(folder / "store"))
    context = tls.client_context(tls.certificate(cert))
    client = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=20)
    client.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 5}))
    assert json.loads(client.getresponse().read())["choices"]
    client.request("GET", "/metrics")
    page = client.getresponse().read().decode()
    client.close()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("text", list(expressions()))
def test_the_metrics_and_labels_of_an_expression_are_there(exposed, text):
    expression = parsed(text)
    selectors = [
        node.vector_selector if isinstance(node, promql.MatrixSelector) else node for node in nodes(expression)
    ]
    selectors = [node for node in selectors if isinstance(node, promql.VectorSelector)]
    assert selectors
    labels = set(OF_PROMETHEUS)
    for one in selectors:
        assert one.name in exposed or one.name == "up"
        own = exposed.get(one.name, set()) | OF_PROMETHEUS
        labels |= own
        for matcher in one.matchers.matchers:
            assert matcher.name in own, (one.name, matcher.name)
            if matcher.name == "path":
                assert set(matcher.value.split("|")) <= set(paths())
    for node in nodes(expression):
        modifier = getattr(node, "modifier", None)
        grouped = getattr(modifier, "labels", None) or getattr(getattr(modifier, "matching", None), "labels", None)
        assert set(grouped or ()) <= labels


def test_an_expression_of_an_unknown_metric_or_label_would_be_found(exposed):
    check = test_the_metrics_and_labels_of_an_expression_are_there
    for wrong in ("phalanx_no_such_metric > 0", 'phalanx_ready{model="x"}', "sum by (le) (phalanx_ready)",
                  "phalanx_ready and on (status) phalanx_ranks", "rate(phalanx_ready_total[5m]) > 0",
                  'phalanx_http_requests_total{path="/nowhere"}'):  # fmt: skip
        with pytest.raises(AssertionError):
            check(exposed, wrong)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_whole_and_explained(rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    kept = promql.parse(rule["expr"]).prettify()
    # `$labels.X` of a summary are labels that the expression's result has: all of them keep instance.
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) == {"instance"}
    kept_labels = re.findall(r"(?:by|on) \(([^)]*)\)", kept)
    assert all("instance" in labels for labels in kept_labels)
    assert f"| `{rule['alert']}` |" in (DOCS / "monitoring.md").read_text()


def test_every_alert_that_is_explained_is_there():
    named = re.findall(r"^\| `(Phalanx\w+)` \|", (DOCS / "monitoring.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(each(ALERTS, "alert"))


def test_the_dashboard_can_be_imported(exposed):
    """The fields that Grafana 11 and later need; the data source is chosen on the page."""
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["id"] is None  # an id would be that of another Grafana's
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        source = {"type": "prometheus", "uid": "${datasource}"}
        assert all(one["datasource"] == source for one in (panel, *panel["targets"]))
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "instance"}
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["instance"]["definition"]).groups()
    assert metric in exposed and label in OF_PROMETHEUS
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))  # no panel lies over another

"""The dashboard and the alerts of examples/monitoring name metrics that a server has."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from meshwright.serving.engine.decode_stats import StepMeans
from meshwright.serving.engine.stats import Stats
from meshwright.serving.front.metrics import merged_metrics
from meshwright.serving.http.metrics import Metrics

FILES = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = json.loads((FILES / "dashboard.json").read_text())["panels"]
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}


@pytest.fixture(scope="module")
def samples():
    """The samples of a server with one replica that has answered, by name, with the labels that each has."""
    means = StepMeans(0.1, 2.0, 3.0, 0.4)
    metrics = Metrics(Stats, lambda: (means, means))
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.observe_completion(first_token_seconds=0.1, token_seconds=0.01)
    found = {}
    for line in merged_metrics(CollectorRegistry(), {0: metrics.text().decode()}, {0: 1}).decode().splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_of_a_server(expression, samples):
    named = re.findall(r"meshwright_\w+", expression)
    assert named
    assert {*named} <= {*samples}
    # Prometheus itself adds the job.
    labels = {
        *re.findall(r'[{,](\w+)=?~?"', expression),
        *(word.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for word in group.split(",")),
    }
    assert labels - {"job"} <= set().union(*(samples[name] for name in named))
    assert expression.count("(") == expression.count(")")


def test_panels_lie_beside_each_other():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len({*places}) == len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert all(panel["description"].endswith(".") for panel in PANELS)
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in RULES)

"""The recipes in launch/ and the commands in the documents: syntax, flags, versions, ports, metrics."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dashboards
import pytest
import recipes
import yaml
from recipes import LAUNCH, ROOT, Flags, objection, value

SHELL = sorted([*LAUNCH.rglob("*.sh"), *(ROOT / "docs").rglob("*.sh")])
RECIPES = sorted((LAUNCH / "recipes").glob("*.sh"))
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *LAUNCH.rglob("*.md")])
YAML = sorted(LAUNCH.rglob("*.yaml"))
DOCKERFILE = LAUNCH / "docker" / "Dockerfile"
COMPOSE = LAUNCH / "docker" / "compose.yaml"
MANIFEST = LAUNCH / "kubernetes" / "server.yaml"
UNIT = LAUNCH / "systemd" / "dflash2-sglang.service"
BOARD = LAUNCH / "grafana" / "dflash2.json"
READERS: dict[Path, Callable[[str], list[Flags]]] = {
    COMPOSE: recipes.in_compose,
    MANIFEST: recipes.in_manifest,
    UNIT: recipes.in_unit,
    **dict.fromkeys(DOCUMENTS, recipes.in_markdown),
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def package() -> dict[str, str]:
    """Our version, our image, and the SGLang we are for, from setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = re.search(r"sglang>=([\d.]+)", config["options"]["install_requires"])
    assert required is not None
    name, version = config["metadata"]["name"], config["metadata"]["version"]
    return {"version": version, "image": f"{name}:{version}", "sglang": required[1]}


# Shell.


@pytest.mark.parametrize("script", SHELL, ids=named)
def test_shell_syntax(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert script.stat().st_mode & 0o111, "not executable"
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", RECIPES, ids=named)
def test_what_a_recipe_launches(script: Path, tmp_path: Path) -> None:
    """Run with a stub for Python; what the user adds comes last, so that it wins."""
    calls = recipes.run_shell(script, tmp_path, "--max-running-requests", "3")
    servers = [flags for call in calls if (flags := recipes.after(call)) is not None]
    assert servers
    for flags in servers:
        assert objection(flags) is None
        assert recipes.server_parser().parse_args(flags).max_running_requests == 3
        assert value(flags, "--speculative-algorithm") == "DFLASH2"


def test_a_recipe_serves_another_pair(tmp_path: Path) -> None:
    environment = {"TARGET": "my target", "DRAFTER": "/drafter", "PORT": "1234"}
    (call,) = recipes.run_shell(LAUNCH / "recipes/qwen3.8-27b.sh", tmp_path, **environment)
    args = recipes.server_parser().parse_args(call[2:])
    assert (args.model_path, args.speculative_draft_model_path) == ("my target", "/drafter")
    assert args.port == 1234


def test_the_router_knows_every_server(tmp_path: Path) -> None:
    calls = recipes.run_shell(LAUNCH / "recipes/router.sh", tmp_path, GPUS="0 1 5")
    (router,) = [f for call in calls if (f := recipes.after(call, (recipes.ROUTER,))) is not None]
    servers = [flags for call in calls if (flags := recipes.after(call)) is not None]
    urls = {f"http://{value(f, '--host')}:{value(f, '--port')}" for f in servers}
    start = router.index("--worker-urls") + 1
    assert len(servers) == len(urls) == 3
    assert urls == set(router[start : start + 3])
    assert value(router, "--port") not in {value(f, "--port") for f in servers}


# Commands elsewhere.


@pytest.mark.parametrize("path", READERS, ids=named)
def test_flags_in_files(path: Path) -> None:
    found = READERS[path](path.read_text())
    if path.suffix != ".md":
        assert {value(flags, "--speculative-algorithm") for flags in found} == {"DFLASH2"}
    assert [problem for flags in found if (problem := objection(flags))] == []


def test_there_are_commands_in_the_documents() -> None:
    """Or the reader of Markdown would be broken."""
    assert len(recipes.in_markdown((ROOT / "README.md").read_text())) >= 2


def test_dockerfile(package: dict[str, str]) -> None:
    text = DOCKERFILE.read_text()
    steps = recipes.dockerfile(text)
    assert f"SGLANG_VERSION={package['sglang']}" in steps["ARG"]
    assert steps["FROM"] == ["lmsysorg/sglang:v${SGLANG_VERSION}"]
    assert json.loads(steps["ENTRYPOINT"][0])[1:] == ["-m", recipes.SERVER]
    (flags,) = recipes.in_comments(text, package["image"])
    assert objection(flags) is None
    assert set(re.findall(r"dflash2-sglang:[\d.]+\d", text)) == {package["image"]}
    # What setup.cfg installs must not be kept out of the image.
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in ("dflash2_sglang", "patches", "setup.cfg", "README.md")} <= set(
        ignored
    )


def test_compose(package: dict[str, str]) -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    server = compose["services"]["server"]
    assert server["image"] == package["image"]
    assert server["build"]["args"]["SGLANG_VERSION"] == package["sglang"]
    assert (COMPOSE.parent / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]) == DOCKERFILE
    (port,) = server["ports"]
    assert port.split(":")[-1] == value(server["command"], "--port")
    devices = server["deploy"]["resources"]["reservations"]["devices"]
    assert len(devices[0]["device_ids"]) == int(value(server["command"], "--tp-size") or 1)
    for name in ("prometheus", "grafana"):
        mounts = [volume.split(":")[0] for volume in compose["services"][name]["volumes"]]
        assert all((COMPOSE.parent / path).exists() for path in mounts if path.startswith("."))


def test_manifest(package: dict[str, str]) -> None:
    documents = {d["kind"]: d for d in yaml.safe_load_all(MANIFEST.read_text())}
    assert set(documents) == {"PersistentVolumeClaim", "Deployment", "Service"}
    spec = documents["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == documents["Service"]["spec"]["selector"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == package["image"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == value(container["args"], "--port")
    assert documents["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
        # SGLang answers after a second at least, and waits up to 20 for the scheduler.
        assert container[probe]["timeoutSeconds"] > 20
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == int(value(container["args"], "--tp-size") or 1)
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    claim = documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert {"claimName": claim} in [v.get("persistentVolumeClaim") for v in pod["volumes"]]


def test_unit() -> None:
    unit = recipes.unit_file(UNIT.read_text())
    (flags,) = recipes.in_unit(UNIT.read_text())
    port = value(flags, "--port")
    assert unit["ExecStartPost"][0].endswith(f"http://127.0.0.1:{port}/health")
    assert unit["WantedBy"] == ["multi-user.target"] and unit["Restart"] == ["on-failure"]
    if (verify := shutil.which("systemd-analyze")) is not None:
        done = subprocess.run([verify, "verify", str(UNIT)], capture_output=True, text=True)
        complaints = done.stderr.splitlines()
        assert all("is not executable" in line for line in complaints), done.stderr


@pytest.mark.parametrize("path", YAML, ids=named)
def test_yaml(path: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))


# The dashboard.


def test_dashboard_queries() -> None:
    board = recipes.dashboard(BOARD)
    expressions = list(dashboards.expressions(board))
    queries = [v["definition"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert dashboards.unknown([*expressions, *queries]) == set()
    assert dashboards.asked(expressions) >= dashboards.of_dflash2()
    for text in expressions:
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
        selected = re.findall(dashboards.NAME.pattern + r"\{([^}]*)\}", text)
        assert len(selected) == len(dashboards.NAME.findall(text)) > 0
        wanted = ('model_name=~"$model_name"', 'instance=~"$instance"')
        assert all(label in labels for labels in selected for label in wanted)


def test_dashboard_layout() -> None:
    board = recipes.dashboard(BOARD)
    assert dashboards.overlaps(board) == []
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in dashboards.panels(board):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert names == {"datasource", "model_name", "instance"}


def test_scrape_config() -> None:
    (job,) = yaml.safe_load((LAUNCH / "grafana/prometheus.yaml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    server = yaml.safe_load(COMPOSE.read_text())["services"][service]
    assert value(server["command"], "--port") == port
    assert "--enable-metrics" in server["command"]


# The overview, and what is said of GPUs.


def test_the_overview_names_every_recipe() -> None:
    text = (LAUNCH / "README.md").read_text()
    files = [*RECIPES, DOCKERFILE, COMPOSE, MANIFEST, UNIT, BOARD, *LAUNCH.glob("*.py")]
    assert [named(f) for f in files if f"({f.relative_to(LAUNCH)})" not in text] == []
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if "://" not in link and not (LAUNCH / link).exists()] == []


def test_it_is_said_that_no_gpu_was_used() -> None:
    needs_gpu = [*RECIPES, DOCKERFILE, COMPOSE, MANIFEST, UNIT]
    silent = [f.name for f in needs_gpu if "run on a GPU by us" not in f.read_text()]
    assert silent == ["cpu-demo.sh"]


# The checks themselves: each injected fault is found.

GOOD = "--model-path M --speculative-algorithm DFLASH2 --speculative-draft-model-path D"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("--speculative-nodes 8", "--speculative-nodes"),
        ("--speculative-num-draft 8", "--speculative-num-draft"),  # an abbreviation
        ("--tp-size four", "four"),
        ("--attention-backend triten", "triten"),
        ("--attention-backend trtllm_mha", "cannot mask a tree"),
        ("--speculative-algorithm DFLASH3", "DFLASH3"),
        ("--enable-lora", "LoRA"),
    ],
)
def test_wrong_flags_are_found(more: str, word: str, tmp_path: Path) -> None:
    assert objection(GOOD.split()) is None
    assert word in str(objection([*GOOD.split(), *more.split()]))
    command = f"python -m {recipes.SERVER} {GOOD} \\\n    {more}"
    (flags,) = recipes.in_markdown(f"Text:\n\n```bash\n{command}  # why\n```\n")
    assert word in str(objection(flags))
    script = tmp_path / "wrong.sh"
    script.write_text(
        f"set -e\nflags=({GOOD}  # why\n{more})\npython3 -m {recipes.SERVER} " + '"${flags[@]}"'
    )
    (call,) = recipes.run_shell(script, tmp_path / "run")
    assert word in str(objection(call[2:]))


@pytest.mark.parametrize("path", [COMPOSE, MANIFEST, UNIT], ids=named)
def test_wrong_flags_are_found_in_files(path: Path) -> None:
    text = path.read_text().replace("--speculative-num-draft-tokens", "--speculative-nodes")
    assert "--speculative-nodes" in str([objection(flags) for flags in READERS[path](text)])


@pytest.mark.parametrize(
    "name",
    [
        "sglang:dflash2_accepted_token_total",
        "sglang:dflash2_accepted_tokens",  # a counter without its suffix
        "sglang:dflash2_width_total",
        "sglang:num_running_requests",
        "sglang:time_to_first_token_seconds",  # a histogram without its part
    ],
)
def test_wrong_metrics_are_found(name: str) -> None:
    right = 'sum(rate(sglang:generation_tokens_total{instance=~"a:b"}[5m]))'
    assert dashboards.unknown([right]) == set()
    assert dashboards.unknown([right, f"sum({name})"]) == {name}


def test_panels_on_top_of_each_other_are_found() -> None:
    board: dict[str, Any] = recipes.dashboard(BOARD)
    board["panels"][2]["gridPos"] = {"x": 5, "y": 1, "w": 4, "h": 4}
    assert len(dashboards.overlaps(board)) >= 1

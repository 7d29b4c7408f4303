"""The configuration file of a cluster, and the division of the machine among the replicas."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.cluster import plan as plan_module
from forerun.cluster.plan import divide_machine, make_plan, read_plan
from forerun.errors import CapacityError, ConfigError
from forerun.load import cache_needs
from tests import tiny
from tests.cluster.deployed import NEEDS_RAY

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.toml"
ONE = {"models": [{"name": "small"}]}


def test_example_file_is_valid() -> None:
    plan = read_plan(EXAMPLE)
    assert [model.name for model in plan.models] == ["small"]
    assert plan.models[0].replicas.min == plan.models[0].replicas.max == 2
    assert plan.settings.host == "127.0.0.1"
    assert plan.address == ""


def test_options_of_models_server_and_ray() -> None:
    replicas = {"min": 2, "max": 5, "requests": 7}
    first = {"name": "a", "draft": "off", "kv-tokens": 4096, "threads": 3, "replicas": replicas}
    second = {"name": "b", "replicas": {"min": 0}}
    plan = make_plan(
        {"models": [first, second], "max-queue": 7, "api_key": "k", "ray": {"address": "auto"}}
    )
    model = plan.models[0]
    assert (model.engine.draft, model.engine.kv_tokens, model.engine.threads) == ("off", 4096, 3)
    assert (model.replicas.min, model.replicas.max, model.replicas.requests) == (2, 5, 7)
    assert (plan.models[1].replicas.min, plan.models[1].replicas.max) == (0, 1)
    assert (plan.settings.max_queue, plan.settings.api_key, plan.address) == (7, ("k",), "auto")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "there is no model"),
        ({"models": []}, "there is no model"),
        ({"models": {"name": "a"}}, "there is no model"),
        ({"models": ["a"]}, "a model's name is None"),
        ({"models": [{}]}, "a model's name is None"),
        ({"models": [{"name": ""}]}, "a model's name is ''"),
        ({"models": [{"name": "a\n"}]}, "a model's name is"),
        ({"models": [{"name": "a"}, {"name": "a:latest"}]}, "two models have the same name"),
        ({"models": [{"name": "a", "drfat": "off"}]}, "did you mean 'draft'?"),
        ({"models": [{"name": "a", "depth": 99}]}, "model 'a': depth=99 is out of range"),
        ({"models": [{"name": "a", "threads": -1}]}, "model 'a': threads=-1"),
        ({"models": [{"name": "a", "replicas": 0}]}, "model 'a': replicas=0 is out of range"),
        ({"models": [{"name": "a", "replicas": "two"}]}, "replicas='two'"),
        ({"models": [{"name": "a", "replicas": {"min": "two"}}]}, "min='two'"),
        ({"models": [{"name": "a", "replicas": {"min": 3, "max": 2}}]}, "max=2 is out of range"),
        ({"models": [{"name": "a", "replicas": {"min": 0, "max": 0}}]}, "max=0 is out of range"),
        ({"models": [{"name": "a", "replicas": {"idle": 0}}]}, "idle=0 is out of range"),
        ({"models": [{"name": "a", "replicas": {"most": 2}}]}, "no option of replicas 'most'"),
        (ONE | {"prot": 80}, "did you mean 'port'?"),
        (ONE | {"port": -1}, "port=-1 is out of range"),
        (ONE | {"ray": {"address": 5}}, "must be a table with an address"),
        (ONE | {"ray": "auto"}, "must be a table with an address"),
        (ONE | {"served_name": "x"}, "a cluster has no served_name: give each of [[models]] a"),
        (ONE | {"indices": "x"}, "a cluster has no indices"),
        (ONE | {"routing": {"lead": 5}}, "a cluster has no routing"),
        (ONE | {"retries": 1}, "a cluster has no retries"),
    ],
)
def test_errors_are_reported_in_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        read_plan(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("models = [")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        read_plan(broken)
    broken.write_text("port = -1\n[[models]]\nname = 'a'\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: port=-1"):
        read_plan(broken)


@NEEDS_RAY
def test_check_shows_what_would_be_started(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        f"port = 0\n[[models]]\nname = 'a'\nmodel = '{tiny.repetitive()}'\nthreads = 2\n"
        "kv_tokens = 4096\ndraft = 'off'\nreplicas = { min = 1, max = 3 }\n"
    )
    result = CliRunner().invoke(app, ["deploy", str(file), "--check"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        f"a: 1 to 3 replicas of {tiny.repetitive()}, "
        "each with 2 threads, 4096 tokens of KV cache, draft off",
        "on 127.0.0.1:0, on a Ray cluster of its own",
    ]


def test_kv_caches_without_a_size_share_a_quarter_of_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_module, "free_ram", lambda: 100 << 20)
    common = {"model": str(tiny.repetitive())}
    engine = make_plan({"models": [{"name": "a"} | common]}).models[0].engine
    token_bytes, _ = cache_needs(engine, tiny.repetitive())
    given = (20 << 20) // token_bytes // 2
    tables = [
        {"name": "b", "replicas": {"min": 1, "max": 3}, "max_rows": 1024},
        {"name": "a", "replicas": 2, "kv_tokens": given},
        {"name": "c", "max_rows": 1},
    ]
    plan = divide_machine(make_plan({"models": [table | common for table in tables]}))
    b, a, c = (model.engine.kv_tokens for model in plan.models)
    assert a == given
    assert b == (80 << 20) // 4 // 4 // token_bytes  # four replicas share a quarter of the rest
    assert c is not None
    assert c < b  # one request cannot fill its share
    assert all(model.engine.threads for model in plan.models)


def test_cache_that_does_not_fit_is_refused_before_anything_starts() -> None:
    table = {
        "name": "a",
        "model": str(tiny.repetitive()),
        "kv_tokens": 4_000_000_000,
        "replicas": 2,
    }
    message = r"^model 'a': 2 KV caches of 4000000000 tokens need"
    with pytest.raises(CapacityError, match=message) as error:
        divide_machine(make_plan({"models": [table]}))
    assert "set a lower kv_tokens" in str(error.value)
    assert "\n" not in str(error.value)


def test_memory_of_a_running_ray_cluster_is_not_divided() -> None:
    table = {"name": "a", "model": str(tiny.repetitive())}
    plan = divide_machine(make_plan({"models": [table], "ray": {"address": "auto"}}))
    assert plan.models[0].engine.kv_tokens is None

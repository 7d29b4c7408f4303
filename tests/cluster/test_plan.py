"""The file of a cluster: what it may say, and that every mistake in it is one line that says what
and where."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.cluster import memory
from forerun.cluster.memory import divided, renewed
from forerun.cluster.plan import make_plan, read_plan, replica_settings, summary
from forerun.errors import CapacityError, ConfigError
from forerun.load import cache_needs
from tests import tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.toml"
ONE = {"models": [{"name": "small"}]}


def test_the_example_is_a_plan() -> None:
    plan = read_plan(EXAMPLE)
    assert [model.name for model in plan.models] == ["small"]
    assert plan.models[0].replicas.min == plan.models[0].replicas.max == 2
    assert plan.settings.host == "127.0.0.1" and plan.address == ""


def test_a_model_has_the_options_of_an_engine_and_a_cluster_those_of_a_server() -> None:
    table = {
        "name": "a",
        "draft": "off",
        "kv-tokens": 4096,
        "threads": 3,
        "replicas": {"min": 2, "max": 5},
    }
    plan = make_plan(
        {"models": [table, {"name": "b"}], "max-queue": 7, "routing": {"lead": 2}, "retries": 0}
    )
    model = plan.models[0]
    assert (model.engine.draft, model.engine.kv_tokens, model.replicas.min, model.replicas.max) == (
        "off",
        4096,
        2,
        5,
    )
    assert plan.threads(model) == 3 and plan.threads(plan.models[1]) >= 1
    assert (plan.settings.max_queue, plan.routing.lead, plan.retries) == (7, 2, 0)


def test_a_replica_is_given_no_key_and_its_own_name() -> None:
    plan = make_plan(
        ONE | {"api_key": "secret", "max_body": 1000, "allowed_hosts": ["llm.example"]}
    )
    settings = replica_settings(plan, plan.models[0])
    assert settings.api_key == () and settings.served_name == "small" and settings.max_body == 1000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "there is no model"),
        ({"models": []}, "there is no model"),
        ({"models": {"name": "a"}}, "there is no model"),
        ({"models": ["a"]}, "models must be tables"),
        ({"models": [{}]}, "a model's name is None"),
        ({"models": [{"name": ""}]}, "a model's name is ''"),
        ({"models": [{"name": "a\n"}]}, "a model's name is"),
        ({"models": [{"name": "a"}, {"name": "a:latest"}]}, "two models have the name 'a'"),
        ({"models": [{"name": "a", "drfat": "off"}]}, "did you mean 'draft'?"),
        ({"models": [{"name": "a", "depth": 99}]}, "model 'a': depth=99 is out of range"),
        ({"models": [{"name": "a", "threads": -1}]}, "model 'a': threads=-1"),
        ({"models": [{"name": "a", "replicas": 0}]}, "model 'a': replicas=0 is out of range"),
        ({"models": [{"name": "a", "replicas": "two"}]}, "replicas='two'"),
        (
            {"models": [{"name": "a", "replicas": {"min": 3, "max": 2}}]},
            "replicas.max=2 is out of range",
        ),
        (
            {"models": [{"name": "a", "replicas": {"min": 0, "max": 0}}]},
            "replicas.max=0 is out of range",
        ),
        (
            {"models": [{"name": "a", "replicas": {"min": 0, "idle": 0}}]},
            "replicas.idle=0 is out of range",
        ),
        (
            {"models": [{"name": "a", "replicas": {"most": 2}}]},
            "there is no option of replicas 'most'",
        ),
        (ONE | {"prot": 80}, "did you mean 'port'?"),
        (ONE | {"port": -1}, "port=-1 is out of range"),
        (ONE | {"retries": 1.5}, "retries=1.5"),
        (ONE | {"routing": 5}, "routing must be a table"),
        (ONE | {"routing": {"leed": 5}}, "did you mean 'lead'?"),
        (ONE | {"ray": {"address": 5}}, "ray.address=5 must be text"),
        (
            ONE | {"served_name": "x"},
            "a cluster has no served_name: give each of [[models]] a name",
        ),
        (ONE | {"indices": "x"}, "a cluster has no indices"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(given)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        read_plan(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("models = [")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        read_plan(broken)
    broken.write_text("port = -1\n[[models]]\nname = 'a'\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: port=-1"):
        read_plan(broken)


def test_check_says_what_would_be_started_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        f"port = 0\n[[models]]\nname = 'a'\nmodel = '{tiny.spoken()}'\nreplicas = {{ min = 1, max = 3 }}\n"
    )
    result = CliRunner().invoke(app, ["deploy", str(file), "--check"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == summary(divided(read_plan(file)))
    assert "a: 1 to 3 replicas of" in result.output and "tokens of KV cache each" in result.output


def test_replicas_that_start_together_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All caches that are fitted take a quarter of what is free and not asked for by others."""
    monkeypatch.setattr(memory, "free_ram", lambda: 100 << 20)
    model = {"model": str(tiny.spoken())}
    each, _ = cache_needs(
        make_plan({"models": [{"name": "a"} | model]}).models[0].engine, tiny.spoken()
    )
    given = (20 << 20) // each // 2
    asked = [
        {"name": "a", "replicas": 2, "kv_tokens": given},
        {"name": "b", "replicas": {"min": 1, "max": 3}, "max_rows": 1024},
        {"name": "c", "max_rows": 1},
    ]
    a, b, c = (
        one.engine.kv_tokens
        for one in divided(make_plan({"models": [one | model for one in asked]})).models
    )
    assert a == given
    assert b == (80 << 20) // 4 // 4 // each  # four replicas are to share a quarter of the rest
    assert c is not None and c < b  # one request cannot fill its share
    assert (
        b
        == divided(make_plan({"models": [one | model for one in asked]}))
        .models[1]
        .options["kv_tokens"]
    )


def test_a_cache_that_does_not_fit_is_one_line_and_at_once() -> None:
    table = {"name": "a", "model": str(tiny.spoken()), "kv_tokens": 4_000_000_000, "replicas": 2}
    with pytest.raises(
        CapacityError, match=r"^model 'a': 2 KV caches of 4000000000 tokens need"
    ) as error:
        divided(make_plan({"models": [table]}))
    assert "set a lower kv_tokens" in str(error.value) and "\n" not in str(error.value)


def test_a_new_file_changes_engines_and_replicas_alone() -> None:
    table = {"name": "a", "model": str(tiny.spoken())}
    old = divided(make_plan({"models": [table], "port": 7}))
    new = renewed(
        old, make_plan({"models": [table | {"replicas": {"min": 0}, "draft": "off"}], "port": 8})
    )
    assert (
        new.settings == old.settings
        and new.models[0].replicas.min == 0
        and new.models[0].engine.draft == "off"
    )
    assert new.models[0].options["kv_tokens"] == old.models[0].engine.kv_tokens
    assert (
        renewed(old, make_plan({"models": [table | {"kv_tokens": 64}]})).models[0].engine.kv_tokens
        == 64
    )
    with pytest.raises(
        ConfigError, match="that takes 64 processors, and Ray has been started with"
    ):
        renewed(old, make_plan({"models": [table | {"threads": 16, "replicas": 4}]}))
    with pytest.raises(ConfigError, match="other models than before"):
        renewed(old, make_plan({"models": [table, table | {"name": "b"}]}))


def test_nothing_is_known_of_the_memory_of_other_machines() -> None:
    plan = make_plan(
        {"models": [{"name": "a", "model": str(tiny.spoken())}], "ray": {"address": "auto"}}
    )
    assert divided(plan) is plan

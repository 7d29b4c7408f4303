"""The playground in a browser: it shows the streamed rounds, and its formulas agree with Python."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forerun.costs import SETTLED, CostModel
from tests.server.fake_playground import CHAT, COSTS, HTML, INFO, FakeServer
from tests.server.serving import Serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
expect = sync_api.expect
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs `chromium` on the path")
TIMES = "\N{MULTIPLICATION SIGN}"
PROMPT = "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n"
WATCH = (
    "addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))"
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """One tab for all tests, each of which loads the page afresh."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        tab = browser.new_page()
        tab.set_default_timeout(15_000)
        tab.add_init_script(WATCH)
        yield tab
        browser.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def chat() -> Iterator[FakeServer]:
    """A server whose model has a chat template."""
    server = FakeServer(info=CHAT)
    yield server
    server.close()


@pytest.fixture
def open_page(tab: Any) -> Iterator[Open]:
    """Open a page with all details open; errors or warnings on the console fail the test."""
    problems: list[str] = []

    def note(message: Any) -> None:
        # The browser itself reports refused requests, which some tests cause on purpose.
        refused = message.text.startswith("Failed to load resource")
        if message.type in ("error", "warning") and not refused:
            problems.append(message.text)

    def fail(error: Any) -> None:
        problems.append(str(error))

    def open_page(url: str, width: int = 1280, **media: str) -> Any:
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(**{"color_scheme": "light", "reduced_motion": "reduce"} | media)
        tab.goto(url)
        tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        return tab

    tab.on("console", note)
    tab.on("pageerror", fail)
    yield open_page
    tab.remove_listener("console", note)
    tab.remove_listener("pageerror", fail)
    assert problems == []


def run(page: Any, prompt: str | None = None, wait: bool = True, **fields: Any) -> list[Any]:
    """Fill in the form and press Run; return the responses."""
    responses: list[Any] = []

    def collect(response: Any) -> None:
        if response.url.endswith("/completions"):
            responses.append(response)

    page.on("response", collect)
    page.locator("#run:enabled").wait_for()
    page.fill("#prompt", prompt or page.input_value("#prompt") or PROMPT)
    for name, value in ({"temperature": 0.5, "seed": 2} | fields).items():
        control = page.locator(f"#form [name={name}]")
        if isinstance(value, bool):
            control.set_checked(value)
        elif name in ("draft", "depth", "rule"):
            control.select_option(str(value))
        else:
            control.fill(str(value))
    page.click("#run:enabled")
    if wait:
        page.locator("#run:enabled").wait_for()
    page.remove_listener("response", collect)
    return responses


def rounds_of(response: Any) -> list[dict[str, Any]]:
    """Read the rounds of a streamed response without the page's code."""
    lines = [line[5:] for line in response.text().splitlines() if line.startswith("data:")]
    chunks = [json.loads(line) for line in lines if line.strip() != "[DONE]"]
    return [chunk["x_spec"] for chunk in chunks if "x_spec" in chunk]


def shown(page: Any) -> list[list[str]]:
    """Return text and source of every token on the page."""
    call = "ts => ts.map(t => [t.textContent, t.dataset.source ?? ''])"
    return list(page.eval_on_selector_all("#tokens .t", call))


def text_of(page: Any) -> str:
    return "".join(text for text, _ in shown(page))


def js(page: Any, call: str, *arguments: Any) -> Any:
    """Call a function of one of the page's modules, "module.function"."""
    name, function = call.split(".")
    code = f"(args) => import('/playground/{name}.js').then((m) => m.{function}(...args))"
    return page.evaluate(code, list(arguments))


def visible(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "◌"


# ------------------------------------------------------------ text and rounds


def test_tokens_and_rejected_drafts_are_those_of_the_stream(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    spec, plain = map(rounds_of, run(page, depth=8))
    tokens = [[t["text"], t["source"]] for r in spec for t in r["tokens"]]
    assert shown(page) == tokens
    assert page.text_content("#tokens .prompt") == page.input_value("#prompt")
    assert [len(r["tokens"]) for r in plain] == [1] * len(tokens)
    looks = set()
    style = "t => (s => [s.textDecorationStyle, s.backgroundColor])(getComputedStyle(t))"
    sources = {source for _, source in tokens if source}
    for source in sources:
        token = page.locator(f"#tokens .t[data-source='{source}']").first
        looks |= set(token.evaluate(style))
        expect(page.locator(f"#legend [data-source='{source}']")).to_contain_text(source)
    assert len(looks) == 2 * len(sources) > 2, "sources differ by more than colour"
    nodes = [node for r in spec[:-1] for node in r["draft"]]  # the last draft is cut off
    rejected = [node["text"].replace("\n", "↵") for node in nodes if not node["accepted"]]
    ghosts = page.locator("#tokens .ghost")
    assert ghosts.all_text_contents()[: len(rejected)] == rejected != []
    expect(ghosts.first).to_be_hidden()
    page.check("#ghosts")
    expect(ghosts.first).to_be_visible()


def test_html_is_shown_literally(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    prompt = "#fake: html\n<script>window.pwned = 3</script><img src=x onerror='window.pwned = 4'>"
    run(page, prompt)
    page.check("#ghosts")
    assert page.text_content("#tokens .prompt") == prompt and text_of(page) == HTML
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img, #tokens b").count() == 0
    run(page, "#fake: lean\n", beside=False, max_tokens=20)  # without rounds
    assert page.text_content("#tokens").startswith("#fake: lean\n default=")


def test_a_long_text_is_only_appended_to(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    page.evaluate(
        """() => {
          window.removed = 0;
          new MutationObserver((list) => {
            for (const m of list) for (const n of m.removedNodes) removed += n.className !== "prompt";
          }).observe(document.getElementById("tokens"), { childList: true });
        }"""
    )
    run(page, "#fake: long\n", beside=False, max_tokens=2000)
    assert len(shown(page)) == 2000 and page.evaluate("removed") == 0


def assert_shows(page: Any, rounds: list[dict[str, Any]], i: int) -> None:
    """Check the panel of a round: its nodes, verdicts and tokens."""
    expect(page.locator("#round-label")).to_have_text(f"Round {i + 1} of {len(rounds)}")
    call = "rows => rows.map(r => [...r.cells].map(c => c.textContent.trim()))"
    cells = page.eval_on_selector_all("#round-nodes tr", call)
    draft = rounds[i]["draft"]
    nodes = [visible(node["text"]) for node in [*draft, rounds[i]["bonus"]]]
    assert sorted(row[0] for row in cells) == sorted(nodes) and cells[-1][1] == "target"
    accepted = sum(node["accepted"] for node in draft)
    assert sum("✓ accepted" in row[5] for row in cells) == accepted
    emitted = page.locator("#round-emitted .chip").all_text_contents()
    assert emitted == [visible(token["text"]) for token in rounds[i]["tokens"]]
    expect(page.locator("#round-depth")).to_have_text(str(rounds[i]["depth"]))


def test_stepping_through_rounds(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    (rounds,) = map(rounds_of, run(page, beside=False, depth=8))
    last = len(rounds) - 1
    steps = {"first": 0, "next": 1, "previous": 0, "last": last}
    for button, there in steps.items():
        page.click(f"#round-{button}", force=True)
        assert_shows(page, rounds, there)
    page.focus("#rounds")
    keys = [("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1), ("End", last)]
    for key, there in keys:
        page.keyboard.press(key)
        assert_shows(page, rounds, there)
    page.focus("#round-slider")  # a slider moves by itself: one step, not two
    page.keyboard.press("ArrowLeft")
    assert_shows(page, rounds, last - 1)
    token = page.locator("#tokens .t[data-round='1']")
    token.first.hover()
    expect(page.locator("#detail")).to_contain_text(f"step {rounds[1]['step']} · p ")
    token.last.click()
    assert_shows(page, rounds, 1)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert_shows(page, rounds, 2)
    assert page.locator("#tokens [tabindex='0']").count() == 1  # one stop of the Tab key
    (rounds,) = map(rounds_of, run(page, beside=False, draft="model:tiny", rule="tree", depth=3))
    page.click("#round-first")
    page.click("#round-next")
    assert_shows(page, rounds, 1)
    call = "cs => cs.map(c => c.getBoundingClientRect().left)"
    assert len(set(page.eval_on_selector_all("#round-nodes .chip", call))) == 3, "a tree"


def test_explanations_of_a_round(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    speed = "3.36 tokens for 0.72 ms, where no draft gives 1 for 0.52 ms: 2.43 times"
    for depth, rate, asked_depth, costs, words in (
        (4, 0.8, "auto", COSTS, speed),
        (4, 0.8, "auto", {}, "without measured costs"),
        (4, None, "auto", COSTS, "Not knowing"),
        (4, 0.05, "auto", COSTS, "a probe"),
        (0, 0.02, "auto", COSTS, "so none"),
        (0, 0.9, "auto", COSTS, "rests between probes"),
        (3, 0.9, 3, COSTS, "Depth 3 was asked for."),
        (0, 0.9, 3, COSTS, "no room"),
    ):
        draft = [{"parent": i, "source": "suffix"} for i in range(depth)]
        round_ = {"depth": depth, "rate": rate, "draft": draft}
        options = {"draft": "suffix", "depth": asked_depth}
        assert words in js(page, "rounds.why", round_, False, options, costs)
    foreseen = "1 of 2 were drafted while the target checked the round before"
    for sources, option, words in (
        (["model"], "model", ""),
        (["ahead&model", "model"], "ahead(model)", foreseen),
        (["model", "model"], "suffix|ahead(model)", "was not foreseen"),
        (["suffix&model", "model"], "suffix>model", "1 of 2 were proposed by several drafters"),
    ):
        text = js(page, "rounds.whence", [{"source": source} for source in sources], option)
        assert words in text if words else not text
    round_ = {"draft": [{"parent": i, "accepted": True} for i in range(3)], "tokens": [{}, {}]}
    ended = "accepted, but the request ended before it"
    assert [js(page, "rounds.fate", round_, i) for i in (1, 2)] == ["accepted", ended]


# ------------------------------------------------------------ plain decoding beside


def test_the_plain_run_is_the_same_request_without_speculation(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    fields = {"seed": 7, "temperature": 0.3, "max_tokens": 90}
    rounds, plain = map(rounds_of, run(page, "hello", depth=4, **fields))
    spec_body, plain_body = fake.bodies
    assert spec_body.pop("speculative") == {"draft": "suffix", "depth": 4, "rule": "match"}
    assert plain_body.pop("speculative") is False
    assert spec_body == plain_body and fields.items() <= spec_body.items()
    expect(page.locator("#badge")).to_have_text("Identical: all 90 token ids equal")
    speeds = []
    for one in (rounds, plain):
        seconds = sum(r["t_draft_ms"] + r["t_verify_ms"] for r in one[1:]) / 1000
        speeds.append(sum(len(r["tokens"]) for r in one[1:]) / seconds)
    for name, speed in zip(("spec", "plain"), speeds, strict=True):
        text = page.text_content(f"#compare-{name}").replace(",", "")
        assert abs(float(text) - speed) <= 1
    assert page.text_content("#compare-ratio") == f"{speeds[0] / speeds[1]:.2f} {TIMES}"
    expect(page.locator("#live-length")).to_have_text(f"{90 / len(rounds):.2f}")
    for a, b, at in (
        ([1, 2], [1, 2], -1),
        ([1, 2], [1], 1),
        ([1, 2, 3], [1, 4, 3], 1),
        ([], [], -1),
    ):
        assert js(page, "run.firstDifference", a, b) == at


def test_the_first_different_token_is_marked(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    run(page, "#fake: differ\n")
    badge = page.locator("#badge")
    expect(badge).to_contain_text("Different from token 5 on")
    expect(badge).to_contain_text("plain “␣else”")
    call = "ts => ts.findIndex(t => t.matches('.differs'))"
    assert page.eval_on_selector_all("#tokens .t", call) == 5
    run(page, rule="token")
    expect(badge).to_contain_text("promises the same distribution, not the same tokens")
    run(page, rule="typical")
    expect(badge).to_contain_text("lossy")


def test_a_run_that_can_copy_from_an_earlier_one_is_marked(open_page: Open, fake: Any) -> None:
    """No mark is needed if the server isolates requests with different salts."""
    page = open_page(fake.url)
    for seed in (1, 2):
        run(page, max_tokens=10, seed=seed)
    expect(page.locator("#caution")).to_contain_text("ran before")
    fake.info = INFO | {"isolation": True}
    open_page(fake.url)
    for _ in range(2):
        run(page, max_tokens=10)
    expect(page.locator("#caution")).to_be_hidden()
    salts = [body["cache_salt"] for body in fake.bodies]
    assert salts[::2] == salts[1::2] and len(set(salts)) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts)


def test_both_answers_are_replayed_from_their_start(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url, reduced_motion="no-preference")
    page.evaluate(
        """() => {
          const count = (kind) => document.querySelectorAll(`#tokens ${kind}`).length;
          window.seen = { later: 0, drafted: 0, ghost: 0 };
          new MutationObserver(() => {
            seen.later += count(".later");
            for (const kind of ["drafted", "ghost"]) seen[kind] += count(`.${kind}.fresh`);
          }).observe(document.getElementById("lanes"), { subtree: true, attributes: true, childList: true });
        }"""
    )
    run(page, "#fake: slow\n", max_tokens=30, depth=4)
    assert all(page.evaluate("seen").values())
    expect(page.locator("#explain")).to_contain_text("ran first, alone")
    for lane in ("spec", "plain"):
        assert page.text_content(f"#pace-{lane}").split()[0] == "30"
    assert page.text_content("#plain-text") == text_of(page)
    before, num_requests = page.text_content("#talk"), len(fake.bodies)
    page.click("#replay-slowly")
    page.click("#stop")
    page.locator("#run:enabled").wait_for()
    assert page.text_content("#talk") == before and len(fake.bodies) == num_requests
    steps = [{"at": at} for at in (500, 500, 520, 600)]  # half a second went into the prompt
    due = [js(page, "player.due", steps, at) for at in (0, 19, 20, 99, 100)]
    assert due == [2, 2, 3, 3, 4]
    page = open_page(fake.url)  # reduced motion
    run(page, max_tokens=60)
    assert "played again" not in page.text_content("#explain")


# ------------------------------------------------------------ chat


def test_a_conversation_continues_with_its_salt(open_page: Open, chat: Any) -> None:
    page = open_page(chat.url)
    page.fill("[name=system]", "Be brief.")
    run(page, "<b>first</b>", max_tokens=12)
    first = text_of(page)
    assert page.input_value("#prompt") == "" and page.text_content("#asked") == "<b>first</b>"
    run(page, "second", max_tokens=8, beside=False)
    assert page.locator("#turns li .answer").text_content() == first
    expect(page.locator("#status")).to_contain_text("It stopped at max tokens.")
    page.click("#renew")
    expect(page.locator("#stage")).to_be_hidden()
    run(page, "third", max_tokens=8, beside=False)
    assert set(chat.paths) == {"/v1/chat/completions"}
    contents = [[m["content"] for m in body["messages"]] for body in chat.bodies]
    start = ["Be brief.", "<b>first</b>"]
    assert contents == [start, start, [*start, first, "second"], ["Be brief.", "third"]]
    salts = [body["cache_salt"] for body in chat.bodies]
    assert salts[0] == salts[1] == salts[2] != salts[3]


def test_stopped_answers_are_kept_and_refused_turns_return(open_page: Open, chat: Any) -> None:
    page = open_page(chat.url)
    run(page, "#fake: slow\n", wait=False)
    page.locator("#tokens .t").nth(5).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped after")
    stopped = text_of(page)
    for kind, words in (
        ("full", "shorten the prompt, or begin a new conversation"),
        ("busy", "wait already"),
        ("stopping", "shutting down"),
    ):
        run(page, f"#fake: {kind}\n", max_tokens=8)
        expect(page.locator("#error")).to_contain_text(words)
        assert page.input_value("#prompt") == f"#fake: {kind}\n"
    run(page, "#fake: narrow\n", max_tokens=8, beside=False)
    expect(page.locator("#status")).to_contain_text("The context is full")
    contents = [message["content"] for message in chat.bodies[-1]["messages"]]
    assert contents == ["#fake: slow\n", stopped, "#fake: narrow\n"]


# ------------------------------------------------------------ form and calculator


def test_empty_sampling_fields_are_left_to_the_server(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    expect(page.locator("[name=top_p]")).to_have_attribute("placeholder", "0.9")
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.8")
    run(page, max_tokens=5, temperature="", seed="", beside=False)
    run(page, max_tokens=5, temperature=0, top_k=20, beside=False)
    empty, full = fake.bodies
    assert not {"temperature", "top_p", "top_k", "min_p"} & empty.keys()
    assert isinstance(empty["seed"], int)
    assert (full["temperature"], full["top_k"]) == (0, 20) and "top_p" not in full
    page.fill("[name=temperature]", "9")
    page.click("#settings summary")
    expect(page.locator("[name=temperature]")).to_be_hidden()
    page.click("#run")
    expect(page.locator("[name=temperature]")).to_be_visible()  # the wrong field is shown
    page.reload()
    for name in ("#rounds", "#calculator", "#detail", "[name=rule]", "[name=temperature]"):
        expect(page.locator(name)).to_be_hidden()


@pytest.mark.parametrize(("sampling", "temperature"), [({}, "0"), ({"temperature": 0.6}, "")])
def test_ready_prompts(
    open_page: Open, chat: Any, sampling: dict[str, float], temperature: str
) -> None:
    """A prompt that copies text is greedy unless the model's authors recommend a temperature."""
    chat.info = CHAT | {"sampling": sampling}
    page = open_page(chat.url)
    buttons = page.locator("#ready button")
    expect(buttons.first).to_contain_text("most of the answer is in the prompt")
    buttons.first.click()
    assert "def total_price" in page.input_value("#prompt")
    assert page.input_value("[name=temperature]") == temperature
    expect(page.locator("#run")).to_be_focused()
    buttons.last.click()
    assert page.input_value("[name=temperature]") == ""
    run(page, draft="suffix", max_tokens=40, depth="2", beside=False)
    label = page.locator("#ready small").last.inner_text()
    assert re.fullmatch(r"last run: \d+\.\d\d tokens a pass, \d+ of \d+ passes drafted", label)


def expected_tokens(rate: float, depth: int) -> float:
    return depth + 1 if rate == 1 else (1 - rate ** (depth + 1)) / (1 - rate)


def slide(page: Any, **values: float) -> None:
    for name, value in values.items():
        page.locator(f"#calc-{name}").fill(str(value))


def test_the_calculator_agrees_with_the_formula(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    page.locator("#run:enabled").wait_for()
    c, v = 0.02 / 4 / 0.52, 0.7 / 0.52  # from the measured costs
    expect(page.locator("#calc-c-from")).to_have_text("measured")
    speedup = f"{expected_tokens(0.7, 4) / (4 * c + v):.3f} {TIMES}"
    assert page.text_content("#calc-speedup") == speedup
    for a, k, c, v in [(0.81, 4, 0.05, 1.08), (0.5, 8, 0.2, 1.6), (1, 16, 0, 1), (0, 3, 0.1, 1.2)]:
        slide(page, k=k, a=a, c=c, v=v)
        curve = [expected_tokens(a, i) / (i * c + 1 + i * (v - 1) / k) for i in range(17)]
        best = curve.index(max(curve))
        words = f"{best} ({curve[best]:.2f} {TIMES})" if best else "0: do not draft"
        assert page.text_content("#calc-expected") == f"{expected_tokens(a, k):.3f}"
        assert page.text_content("#calc-speedup") == f"{curve[k]:.3f} {TIMES}"
        assert page.text_content("#calc-best") == words
    (rounds,) = map(rounds_of, run(page, beside=False))
    accepted = sum(node["accepted"] for r in rounds for node in r["draft"])
    rejected = sum(any(not node["accepted"] for node in r["draft"]) for r in rounds)
    page.click("#calc-reset")
    expect(page.locator("#calc-a-from")).to_have_text("from the last run")
    slide(page, k=4)
    rate = accepted / (accepted + rejected)
    assert page.text_content("#calc-expected") == f"{expected_tokens(rate, 4):.3f}"
    fake.info = INFO | {"costs": {}}
    expect(open_page(fake.url).locator("#calc-c-from")).to_have_text("assumed")


@pytest.mark.parametrize(
    "table", [{1: 0.5, 5: 0.7, 9: 4.0}, {3: 1.0}, {2: 0.8, 4: 0.6}, {16: 1.0, 24: 1.1}]
)
def test_costs_are_interpolated_as_by_the_cost_model(
    open_page: Open, fake: Any, table: dict[int, float]
) -> None:
    learned = CostModel()
    for size, cost in table.items():
        for _ in range(SETTLED):
            learned.add_forward(size, cost)
            learned.add_draft("model", size, cost)
    costs = {str(size): cost for size, cost in table.items()}
    sizes = list(range(1, 32))
    code = """([costs, sizes]) => import('/playground/calculator.js').then((m) => {
        const read = m.measured({ pass_ms: costs, draft_ms: { model: costs } }, 'model');
        return sizes.map((size) => [read.pass(size), read.draft(size)]);
    })"""
    read = open_page(fake.url).evaluate(code, [costs, sizes])
    expected = [[learned.forward(size), learned.draft("model", size)] for size in sizes]
    for size, pair, own in zip(sizes, read, expected, strict=True):
        assert pair == pytest.approx(own, rel=0.01), size


# ------------------------------------------------------------ errors


def test_the_page_asks_for_a_key_and_keeps_it_for_the_tab(open_page: Open, fake: Any) -> None:
    fake.key = "secret"
    page = open_page(fake.url)
    expect(page.locator("#key-dialog")).to_contain_text("an API key is needed")
    page.keyboard.press("Escape")
    expect(page.locator("#error")).to_have_text("an API key is needed")
    open_page(fake.url)
    page.fill("#key", "wrong")
    page.click("#key-dialog .primary")
    expect(page.locator("#key")).to_have_value("")  # it asks again
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    run(page, max_tokens=10, beside=False)
    assert len(shown(page)) == 10
    page.reload()
    expect(page.locator("#run")).to_be_enabled()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    page.evaluate("sessionStorage.clear()")


def test_errors_are_shown(open_page: Open) -> None:
    server = FakeServer()
    page = open_page(server.url)
    error = page.locator("#error")
    for kind, words in (
        ("refuse", "max_tokens must be at most 2048: the context is <no longer> than that (max_tokens)"),
        ("break", "the model ran out of <memory>"),
        ("cut", "the stream ended before it was complete"),
    ):  # fmt: skip
        run(page, f"#fake: {kind}\n")
        expect(error).to_have_text(words)
    assert shown(page)  # the text so far stays
    run(page, "hello", max_tokens=5)
    expect(error).to_be_hidden()
    server.close()
    run(page)
    expect(error).to_contain_text("the connection to the server failed")
    expect(page.locator("#run")).to_be_enabled()


def test_stop_ends_either_run(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    run(page, "#fake: slow\n", wait=False)
    page.locator("#tokens .t").nth(5).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped after")
    assert 5 < len(shown(page)) < 160
    expect(page.locator("#compare")).to_be_hidden()
    run(page, "#fake: slow\n", wait=False, max_tokens=40)
    expect(page.locator("#status")).to_contain_text("the same without speculation")
    page.locator("#plain-text:not(:empty)").wait_for()
    page.click("#stop")
    identical = re.compile(r"Identical: the first \d+ token ids? equal")
    expect(page.locator("#badge")).to_have_text(identical)
    expect(page.locator("#run")).to_be_enabled()
    assert fake.aborted >= 1


def test_events_are_parsed_wherever_they_are_cut(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    text = 'data: {"a": 1}\r\n\r\n: comment\r\ndata:two\ndata: lines\n\nevent: x\rdata: é\r\rdata: open'
    code = """([text, size]) => import('/playground/api.js').then(({ sseParser }) => {
        const got = [];
        const feed = sseParser((data) => got.push(data));
        for (let i = 0; i < text.length; i += size) feed(text.slice(i, i + size));
        return got;
    })"""
    for size in (1, 2, 3, 7, 1000):
        assert page.evaluate(code, [text, size]) == ['{"a": 1}', "two\nlines", "é"]


# ------------------------------------------------------------ the page itself


def test_all_controls_are_reachable_by_keyboard(open_page: Open, fake: Any) -> None:
    page = open_page(fake.url)
    page.locator("#run:enabled").wait_for()
    for key in ("Tab", "Enter", "Enter"):  # the first ready prompt, which focuses Run
        page.keyboard.press(key)
    page.locator("#badge").wait_for()
    page.locator("#run:enabled").wait_for()
    active = "document.activeElement.id || document.activeElement.className.split(' ')[0]"
    page.focus("#plain-output")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(active) == "t"
    reached = []
    for _ in range(45):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(active))
    assert {"ghosts", "run", "rounds", "round-slider", "calc-a", "replay"} <= set(reached)
    unnamed = "e => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim())"
    controls = "input, select, textarea, button"
    assert page.eval_on_selector_all(controls, f"es => es.filter({unnamed}).length") == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_window_width_scrolls_sideways(open_page: Open, chat: Any, width: int) -> None:
    page = open_page(chat.url, width)
    run(page, "#fake: differ\n" + "y" * 300)
    run(page, "#fake: differ\n" + "x" * 300, draft="model:tiny", depth=6, rule="tree")
    page.check("#ghosts")
    page.click("#round-next")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_motion_and_colours_follow_the_preferences(open_page: Open, fake: Any) -> None:
    moves = "getComputedStyle(document.getElementById('live-share')).transitionDuration"
    assert open_page(fake.url, reduced_motion="reduce").evaluate(moves) == "0s"
    assert open_page(fake.url, reduced_motion="no-preference").evaluate(moves) != "0s"
    names = ["ink", "quiet", "accent", "bad", *(f"src-{i}" for i in range(5)), "paper", "panel"]
    style = "getComputedStyle(document.documentElement)"
    code = f"names => names.map((n) => {style}.getPropertyValue(`--${{n}}`).trim())"
    for scheme in ("light", "dark"):
        *inks, paper, panel = open_page(fake.url, color_scheme=scheme).evaluate(code, names)
        for i, ink in enumerate(inks):
            least = 4.5 if i < 4 else 3  # text and underlines
            assert min(contrast(ink, paper), contrast(ink, panel)) >= least, (scheme, ink)


def contrast(a: str, b: str) -> float:
    """Return WCAG's contrast ratio of two colours #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def test_the_real_server_and_its_content_security_policy(
    open_page: Open, tab: Any, server: Serving
) -> None:
    """No resource is external or inline, and the page works with a real stream."""
    requests: list[str] = []

    def note(request: Any) -> None:
        requests.append(request.url)

    tab.on("request", note)
    headers = tab.goto(server.url + "/").all_headers()
    page = open_page(server.url + "/")
    spec, _ = map(rounds_of, run(page, PROMPT, max_tokens=20, depth=4))
    tab.remove_listener("request", note)
    assert text_of(page) == "".join(t["text"] for r in spec for t in r["tokens"])
    assert page.text_content("#badge").startswith("Identical: all ")
    assert all(url.startswith((server.url, "data:")) for url in requests)
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert page.locator("script:not([src]), style, [onclick]").count() == 0

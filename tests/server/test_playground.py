"""The playground in a real browser: it shows what the stream said, and computes what Python
computes.

`page_url` is the server most tests talk to; those that need refusals, errors or a slow stream have
the fake one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forerun import LLM
from forerun.costs import SETTLED, Costs
from forerun.engine.depth import DepthPolicy
from tests import tiny
from tests.server.fake_playground import CHAT, COSTS, CSP, HTML, INFO, FakeServer
from tests.server.serving import serving

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need the package playwright"
)
Page, Browser, expect = sync_api.Page, sync_api.Browser, sync_api.expect
TIMES, NONE = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the browser tests need a `chromium` on the path"
)
PROMPT = "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument('--name',"
WATCH = "addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective, e.sourceFile))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def chatting() -> Iterator[FakeServer]:
    """A model that chats."""
    server = FakeServer(info=CHAT)
    yield server
    server.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, LLM]]:
    """A real server with a tiny model."""
    llm = LLM(tiny.spoken(), context=2048, kv_tokens=8192)
    with serving(llm) as running:
        yield running.url, llm


@pytest.fixture
def page_url(served: tuple[str, LLM]) -> str:
    """Where the page is, with a slash at the end; nothing is known of earlier tests, whose passes
    may be slow."""
    url, llm = served
    llm.forget()
    llm.engine.set_policy(DepthPolicy())
    return url + "/"


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    """One tab for all tests, which saves most of their time; each loads the page afresh."""
    tab = browser.new_page()
    tab.set_default_timeout(15_000)
    tab.add_init_script(WATCH)
    return tab


@pytest.fixture
def open_page(tab: Page) -> Iterator[Callable[..., Page]]:
    """Opens the page at a URL, `width` wide, details open. Nothing may complain on the console, the
    CSP neither."""
    complaints: list[str] = []

    def note(message: Any) -> None:
        # the browser itself notes refused requests; the tests of refusals look at the page
        if message.type in ("error", "warning") and not message.text.startswith(
            "Failed to load resource"
        ):
            complaints.append(message.text)

    def fail(error: Any) -> None:
        complaints.append(str(error))

    def open_page(url: str, width: int = 1280, **media: str) -> Page:
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(**{"color_scheme": "light", "reduced_motion": "reduce"} | media)
        tab.goto(url)
        tab.evaluate(
            "for (const details of document.querySelectorAll('details')) details.open = true"
        )
        return tab

    tab.on("console", note)
    tab.on("pageerror", fail)
    yield open_page
    tab.remove_listener("console", note)
    tab.remove_listener("pageerror", fail)
    assert complaints == []


def run(page: Page, prompt: str | None = None, wait: bool = True, **fields: Any) -> list[Any]:
    """Fill in the form and press Run; the responses of what it asked for."""
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


def traces(response: Any) -> list[dict[str, Any]]:
    """The rounds of one streamed response, read without any of the page's code."""
    events = [line[5:] for line in response.text().splitlines() if line.startswith("data:")]
    assert events[-1].strip() == "[DONE]"
    return [chunk["x_spec"] for chunk in map(json.loads, events[:-1]) if "x_spec" in chunk]


def visible(text: str) -> str:
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "◌"


def shown_tokens(page: Page) -> list[list[str]]:
    """Text and source of every token on the page."""
    return page.eval_on_selector_all(
        "#tokens .t", "ts => ts.map(t => [t.textContent, t.dataset.source ?? ''])"
    )


def mixed_round(rounds: list[dict[str, Any]]) -> int:
    """The first round that kept a drafted token and lost another: certain to be there at a fixed
    depth only."""
    return next(
        i for i, r in enumerate(rounds) if {n["accepted"] for n in r["draft"]} == {True, False}
    )


# ---- text


def test_tokens_are_those_of_the_stream_marked_by_source(open_page, page_url) -> None:
    page = open_page(page_url)
    spec, plain = run(page, depth=8, temperature=0.7, seed=4)  # automatic depth may draft nothing
    tokens = [[t["text"], t["source"]] for r in traces(spec) for t in r["tokens"]]
    assert shown_tokens(page) == tokens
    assert page.text_content("#tokens .prompt") == page.input_value("#prompt")
    sources = {source for _, source in tokens if source}
    assert sources
    assert [len(r["tokens"]) for r in traces(plain)] == [1] * len(tokens)  # a pass says one token
    looks = {}
    for source in sources:
        token = page.locator(f"#tokens .t[data-source='{source}']").first
        looks[source] = token.evaluate(
            "t => (s => [s.textDecorationStyle, s.backgroundColor])(getComputedStyle(t))"
        )
        expect(page.locator(f"#legend [data-source='{source}']")).to_contain_text(source)
    styles, colours = zip(*looks.values(), strict=True)
    assert len(set(styles)) == len(set(colours)) == len(sources)  # never colour alone
    assert page.locator("#tokens .t.drafted:not([data-source])").count() == 0


def test_ghosts_stand_where_they_were_rejected(open_page, page_url) -> None:
    page = open_page(page_url)
    rounds = traces(
        run(page, beside=False, depth=8, temperature=0.7, seed=4)[0]
    )  # some drafts are rejected
    rejected = [
        n["text"].replace("\n", "↵") for r in rounds for n in r["draft"] if not n["accepted"]
    ]
    ghosts = page.locator("#tokens .ghost")
    assert ghosts.all_text_contents() == rejected
    expect(ghosts.first).to_be_hidden()
    page.check("#ghosts")
    expect(ghosts.first).to_be_visible()
    assert "line-through" in ghosts.first.evaluate("g => getComputedStyle(g).textDecorationLine")
    i = mixed_round(rounds)
    around = page.eval_on_selector_all(
        f"#tokens [data-round='{i}']",
        "ts => ts.map(t => (t.matches('.ghost') ? '-' : '+') + t.textContent)",
    )
    kept = ["+" + t["text"] for t in rounds[i]["tokens"]]
    lost = ["-" + n["text"].replace("\n", "↵") for n in rounds[i]["draft"] if not n["accepted"]]
    assert around == [*kept[:-1], *lost, kept[-1]]
    page.uncheck("#ghosts")
    expect(ghosts.first).to_be_hidden()


def test_a_token_tells_its_numbers_on_hover_and_focus(open_page, page_url) -> None:
    page = open_page(page_url)
    rounds = traces(
        run(page, beside=False, depth=8, temperature=0.7, seed=4)[0]
    )  # some drafts are rejected
    i = mixed_round(rounds)
    node = rounds[i]["draft"][0]
    token = page.locator(f"#tokens .t[data-round='{i}']")
    token.first.hover()
    step = rounds[i]["step"]
    expect(page.locator("#detail")).to_contain_text(
        f"{node['source']}, accepted · step {step} · p {node['p']:.2f}"
    )
    token.last.click()
    expect(page.locator("#detail")).to_contain_text(f"the target's own · step {step}")
    expect(page.locator("#round-label")).to_have_text(f"Round {i + 1} of {len(rounds)}")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.round") == str(i + 1)
    expect(page.locator("#detail")).to_contain_text(f"step {rounds[i + 1]['step']}")
    page.keyboard.press("Enter")
    expect(page.locator("#round-label")).to_have_text(f"Round {i + 2} of {len(rounds)}")
    assert (
        page.locator("#tokens [tabindex='0']").count() == 1
    )  # one stop of the Tab key, not two thousand


def test_html_is_shown_literally(open_page, fake) -> None:
    page = open_page(fake.url)
    prompt = "#fake: html\n<script>window.pwned = 3</script><img src=x onerror='window.pwned = 4'>"
    run(page, prompt)
    page.check("#ghosts")
    assert page.text_content("#tokens .prompt") == prompt
    assert "".join(text for text, _ in shown_tokens(page)) == HTML
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img, #tokens b").count() == 0


def test_a_stream_without_a_trace_still_shows_its_text(open_page, fake) -> None:
    page = open_page(fake.url)
    run(page, "#fake: lean\n", beside=False, max_tokens=20)
    assert page.text_content("#tokens").startswith("#fake: lean\n default=")


def test_a_long_text_is_only_ever_appended_to(open_page, fake) -> None:
    page = open_page(fake.url)
    page.evaluate(
        """() => {
          window.removed = window.batches = window.longest = 0;
          new MutationObserver((list) => {
            window.batches += 1;
            for (const m of list) for (const n of m.removedNodes) window.removed += n.className !== "prompt";
          }).observe(document.getElementById("tokens"), { childList: true });
          new PerformanceObserver((list) => {
            for (const e of list.getEntries()) window.longest = Math.max(window.longest, e.duration);
          }).observe({ type: "longtask" });
        }"""
    )
    run(page, "#fake: long\n", beside=False, max_tokens=2000)
    assert len(shown_tokens(page)) == 2000
    assert page.evaluate("[window.removed, window.batches > 2]") == [0, True]
    assert page.evaluate("window.longest") < 1000  # generous: the machine is shared
    page.keyboard.press("Escape")
    assert page.evaluate(
        "(() => { const o = document.getElementById('output'); return o.scrollTop > 0; })()"
    )


# ---- rounds


def assert_shows(page: Page, rounds: list[dict[str, Any]], i: int) -> None:
    expect(page.locator("#round-label")).to_have_text(f"Round {i + 1} of {len(rounds)}")
    cells = page.eval_on_selector_all(
        "#round-nodes tr", "rows => rows.map(r => [...r.cells].map(c => c.textContent.trim()))"
    )
    nodes = [*rounds[i]["draft"], rounds[i]["bonus"]]
    assert sorted(c[0] for c in cells) == sorted(visible(n["text"]) for n in nodes)
    assert cells[-1][1] == "target"
    assert sum(c[5].endswith("✓ accepted") for c in cells) == sum(
        n["accepted"] for n in rounds[i]["draft"]
    )
    emitted = page.locator("#round-emitted .chip").all_text_contents()
    assert emitted == [visible(t["text"]) for t in rounds[i]["tokens"]]
    expect(page.locator("#round-depth")).to_have_text(str(rounds[i]["depth"]))
    marked = page.locator("#tokens .now").all_text_contents()
    assert marked == [t["text"] for t in rounds[i]["tokens"]]


def test_stepping_by_buttons_and_keys(open_page, page_url) -> None:
    page = open_page(page_url)
    rounds = traces(run(page, beside=False, depth=8, temperature=0.7, seed=4)[0])
    last = len(rounds) - 1
    assert_shows(
        page, rounds, next(i for i, r in enumerate(rounds) if r["draft"])
    )  # where it opens
    for button, there in [
        ("first", 0),
        ("next", 1),
        ("next", 2),
        ("previous", 1),
        ("last", last),
        ("next", last),
    ]:
        page.click(
            f"#round-{button}", force=True
        )  # at the end the button is marked as disabled but keeps the focus
        assert_shows(page, rounds, there)
    page.focus("#rounds")
    for key, there in [
        ("Home", 0),
        ("ArrowLeft", 0),
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("End", last),
    ]:
        page.keyboard.press(key)
        assert_shows(page, rounds, there)
    page.focus("#round-slider")  # a slider moves by itself: one step, not two
    page.keyboard.press("ArrowLeft")
    assert_shows(page, rounds, last - 1)


def test_a_round_says_what_became_of_each_node_and_why_so_deep(open_page, page_url) -> None:
    page = open_page(page_url)
    rounds = traces(
        run(page, beside=False, depth=8, temperature=0.7, seed=4)[0]
    )  # some drafts are rejected
    i = mixed_round(rounds)
    page.click("#round-first")
    for _ in range(i):
        page.click("#round-next")
    expected = []
    for node in rounds[i]["draft"]:
        parent_kept = node["parent"] == 0 or rounds[i]["draft"][node["parent"] - 1]["accepted"]
        expected.append(
            "✓ accepted" if node["accepted"] else "✕ rejected" if parent_kept else "· not reached"
        )
    rows = page.locator("#round-nodes tr")
    assert [t.strip() for t in rows.locator(".verdict").all_text_contents()] == [
        *expected,
        "+ said instead",
    ]
    first = rounds[i]["draft"][0]
    assert rows.first.locator(".number").all_text_contents()[:2] == [f"{first['p']:.2f}", NONE]
    rounds = traces(
        run(page, beside=False, depth="auto", temperature=0, max_tokens=400)[0]
    )  # a loop is worth drafts
    i = next(i for i, r in enumerate(rounds) if r["draft"])
    page.click("#round-first")
    for _ in range(i):
        page.click("#round-next")
    why = page.text_content("#round-why")
    a, k = rounds[i]["rate"], rounds[i]["depth"]
    assert (
        f"At {round(100 * a)} % expected acceptance, depth {k} gives {expected_tokens(a, k):.2f} tokens"
        in why
    )


def test_why_covers_every_case(open_page, page_url) -> None:
    page = open_page(page_url)
    cases = [
        (
            {"depth": 4, "rate": 0.8},
            "auto",
            COSTS,
            "3.36 tokens for 0.72 ms, where no draft gives 1 for 0.52 ms: 2.43 times",
        ),
        ({"depth": 4, "rate": 0.8}, "auto", {}, "without measured costs"),
        ({"depth": 4, "rate": None}, "auto", COSTS, "Not knowing"),
        ({"depth": 4, "rate": 0.05}, "auto", COSTS, "a probe"),
        ({"depth": 0, "rate": 0.02}, "auto", COSTS, "so none"),
        ({"depth": 0, "rate": 0.9}, "auto", COSTS, "rests between probes"),
        ({"depth": 3, "rate": 0.9}, 3, COSTS, "Depth 3 was asked for."),
        ({"depth": 0, "rate": 0.9}, 3, COSTS, "no room"),
    ]
    for round_, asked, costs, words in cases:
        draft = [{"parent": i, "source": "suffix"} for i in range(round_["depth"])]
        arguments = [{**round_, "draft": draft}, {"draft": "suffix", "depth": asked}, costs]
        call = "(args) => import('/playground/rounds.js').then((m) => m.why(args[0], false, args[1], args[2]))"
        assert words in page.evaluate(call, arguments)


def test_who_said_what_of_a_round(open_page, fake) -> None:
    """Levels of a cascade and several in one tree, and whether the round before was foreseen."""
    page = open_page(fake.url)
    for sources, asked, words in (
        (["model"], "model", ""),
        (
            ["ahead&model", "model"],
            "ahead(model)",
            "1 of 2 were drafted while the target checked the round before",
        ),
        (["model", "model"], "suffix|ahead(model)", "was not foreseen"),
        (["suffix&model", "model"], "suffix>model", "1 of 2 were said by more than one drafter"),
        ([], "ahead(model)", ""),
    ):
        call = "(args) => import('/playground/rounds.js').then((m) => m.whence(args[0], args[1]))"
        said = page.evaluate(call, [[{"source": source} for source in sources], asked])
        assert words in said if words else not said


def test_what_was_said_of_a_round_stays(open_page, tab: Page) -> None:
    """Costs that were measured later change nothing: they were not known when the depth was
    chosen."""
    server = FakeServer(info=INFO | {"costs": {}})
    with tab.expect_response("**/server_info"):
        page = open_page(server.url)
    server.info = INFO  # while it runs, the server measures
    run(page, beside=False, max_tokens=30, depth=4)
    expect(page.locator("#calc-c-from")).to_have_text("measured")
    page.click("#round-last")
    page.click("#round-previous")
    expect(page.locator("#round-why")).to_contain_text("without measured costs yet")
    run(page, beside=False, max_tokens=30, depth=4)
    expect(page.locator("#round-why")).to_contain_text("times the speed")
    server.close()


def test_a_tree_is_drawn_as_one(open_page, fake) -> None:
    page = open_page(fake.url)
    rounds = traces(run(page, beside=False, draft="model:tiny", rule="tree", depth=3)[0])
    page.click("#round-first")
    page.click("#round-next")
    assert_shows(page, rounds, 1)
    lefts = page.eval_on_selector_all(
        "#round-nodes .chip", "cs => cs.map(c => c.getBoundingClientRect().left)"
    )
    level = [0]
    for node in rounds[1]["draft"]:
        level.append(level[node["parent"]] + 1)
    assert len(set(lefts)) == max(level) == 3
    q = page.locator("#round-nodes tr:first-child .number").nth(1)
    expect(q).to_have_text(re.compile(r"\d\.\d\d"))


# ---- the race


def pace(page: Page, lane: str) -> int:
    """Tokens that a lane says it has."""
    return int(page.text_content(f"#pace-{lane}").split()[0])


def watch(page: Page) -> None:
    """Keep what is seen from now on: the least tokens in sight, the largest lead, the drafts
    without a verdict yet."""
    page.evaluate(
        """() => {
          const count = (selector) => document.querySelectorAll(`#tokens ${selector}`).length;
          const pace = (lane) => parseInt(document.getElementById(`pace-${lane}`).textContent) || 0;
          window.seen = { least: 1e9, lead: 0, later: 0, drafted: 0, ghost: 0 };
          new MutationObserver(() => {
            seen.least = Math.min(seen.least, count(".t:not(.later)"));
            if (pace("plain")) seen.lead = Math.max(seen.lead, pace("spec") - pace("plain"));
            seen.later += count(".later");
            for (const kind of ["drafted", "ghost"]) seen[kind] += count(`.${kind}.fresh`);
          }).observe(document.getElementById("lanes"), { subtree: true, attributes: true, childList: true });
        }"""
    )


def test_both_start_from_zero_each_at_its_pace(open_page, fake) -> None:
    page = open_page(fake.url, reduced_motion="no-preference")
    run(page, "#fake: slow\n", wait=False, max_tokens=60, depth=4)
    page.locator("#tokens .t").nth(20).wait_for()
    watch(page)
    page.locator("#run:enabled").wait_for()
    seen = page.evaluate("seen")
    assert seen["least"] < 20  # the recorded answer began again
    assert seen["lead"] > 20  # a round says several tokens in the time of a pass
    expect(page.locator("#explain")).to_contain_text("ran first, alone")
    assert (
        page.locator("#tokens .t:not(.later)").count()
        == pace(page, "spec")
        == pace(page, "plain")
        == 60
    )
    assert page.text_content("#plain-text") == "".join(text for text, _ in shown_tokens(page))
    for lane in ("spec", "plain"):
        expect(page.locator(f"#pace-{lane}")).to_contain_text(" tokens/s")


def test_both_can_be_played_again(open_page, fake) -> None:
    page = open_page(fake.url, reduced_motion="no-preference")
    run(page, "#fake: slow\n", max_tokens=30, depth=4)
    before, asked = page.text_content("#talk"), len(fake.bodies)
    for button in ("replay", "replay-slowly"):
        watch(page)
        page.click(f"#{button}")
        if button == "replay-slowly":
            page.click("#stop")
        page.locator("#run:enabled").wait_for()
        assert page.evaluate("seen.later") > 0
        assert (
            page.text_content("#talk") == before
        )  # also where it was stopped: a replay ends with what there was
    assert len(fake.bodies) == asked


def test_drafts_are_grey_for_a_moment(open_page, fake) -> None:
    page = open_page(fake.url, reduced_motion="no-preference")
    watch(page)
    run(page, "#fake: slow\n", max_tokens=60, depth=4, beside=False)
    seen = page.evaluate("seen")
    assert seen["drafted"] > 0 and seen["ghost"] > 0
    expect(page.locator("#tokens .fresh, #tokens .struck")).to_have_count(0)
    expect(page.locator("#tokens .ghost").first).to_be_hidden()


def test_who_wants_no_motion_gets_none(open_page, fake) -> None:
    page = open_page(fake.url)
    watch(page)
    run(page, max_tokens=60)
    seen = page.evaluate("seen")
    assert seen["later"] == seen["drafted"] == seen["ghost"] == 0
    assert page.text_content("#plain-text") == "".join(text for text, _ in shown_tokens(page))
    assert "played again" not in page.text_content("#explain")


def test_a_recording_is_played_at_its_pace(open_page, page_url) -> None:
    page = open_page(page_url)
    steps = [{"at": at} for at in (500, 500, 520, 600)]  # half a second went into the prompt
    call = "([steps, at]) => import('/playground/player.js').then((m) => m.due(steps, at))"
    assert [page.evaluate(call, [steps, at]) for at in (0, 19, 20, 99, 100)] == [2, 2, 3, 3, 4]
    assert page.evaluate(call, [[], 5]) == 0


# ---- chat


def test_a_conversation_goes_on_with_its_salt(open_page, chatting) -> None:
    page = open_page(chatting.url)
    del chatting.bodies[:], chatting.paths[:]
    page.fill("[name=system]", "Be brief.")
    run(page, "first", max_tokens=12)
    first = "".join(text for text, _ in shown_tokens(page))
    assert page.input_value("#prompt") == "" and page.text_content("#asked") == "first"
    run(page, "second", max_tokens=8, beside=False)
    page.click("#renew")
    expect(page.locator("#stage")).to_be_hidden()
    for prompt in ("third", "third"):  # what began a conversation begins another
        run(page, prompt, max_tokens=8, beside=False)
    assert set(chatting.paths) == {"/v1/chat/completions"}
    said = [[(m["role"], m["content"]) for m in body["messages"]] for body in chatting.bodies]
    system = ("system", "Be brief.")
    assert said[:2] == [[system, ("user", "first")]] * 2  # the race asks the same
    assert said[2] == [system, ("user", "first"), ("assistant", first), ("user", "second")]
    assert said[3:] == [[system, ("user", "third")]] * 2
    salts = [body["cache_salt"] for body in chatting.bodies]
    assert salts[0] == salts[1] == salts[2] and len(set(salts)) == 3


def test_earlier_turns_stay_as_they_were(open_page, chatting) -> None:
    page = open_page(chatting.url)
    run(page, "<b>first</b>", max_tokens=12)
    first, ratio = page.text_content("#plain-text"), page.text_content("#compare-ratio")
    run(page, "second", max_tokens=8, beside=False)
    turn = page.locator("#turns li")
    expect(turn.locator(".asked")).to_have_text("<b>first</b>")
    assert turn.locator(".answer").text_content() == first
    expect(turn.locator("small")).to_contain_text(f"{ratio} plain decoding")


def test_a_stopped_answer_is_kept(open_page, chatting) -> None:
    page = open_page(chatting.url)
    run(page, "#fake: slow\n", wait=False)
    page.locator("#tokens .t").nth(5).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped after")
    said = "".join(text for text, _ in shown_tokens(page))
    run(page, "go on", max_tokens=8)
    assert chatting.bodies[-1]["messages"][1] == {"role": "assistant", "content": said}


def test_a_refused_turn_goes_back_to_the_form(open_page, chatting) -> None:
    page = open_page(chatting.url)
    run(page, "first", max_tokens=8)
    for kind, words in [
        ("full", "shorten the prompt, or begin a new conversation"),
        ("busy", "wait already"),
        ("stopping", "shutting down"),
    ]:
        run(page, f"#fake: {kind}\n", max_tokens=8)
        expect(page.locator("#error")).to_contain_text(words)
        assert page.input_value("#prompt") == f"#fake: {kind}\n"
    run(page, "second", max_tokens=8)
    assert [m["content"] for m in chatting.bodies[-1]["messages"] if m["role"] == "user"] == [
        "first",
        "second",
    ]


def test_why_an_answer_was_cut_is_said(open_page, chatting) -> None:
    page = open_page(chatting.url)
    run(page, "short", max_tokens=8, beside=False)
    expect(page.locator("#status")).to_contain_text("It stopped at max tokens.")
    run(page, "#fake: narrow\n", beside=False, max_tokens=8)
    expect(page.locator("#status")).to_contain_text("The context is full")


def test_a_conversation_survives_a_server_that_goes_away(open_page) -> None:
    server = FakeServer(info=CHAT)
    page = open_page(server.url)
    run(page, "#fake: cut\n")
    expect(page.locator("#error")).to_have_text("the stream ended before it was complete")
    said = "".join(text for text, _ in shown_tokens(page))
    server.close()
    run(page, "go on")
    expect(page.locator("#error")).to_contain_text("the connection to the server failed")
    expect(page.locator("#turns .answer")).to_have_text(said, use_inner_text=False)
    expect(page.locator("#run")).to_be_enabled()


# ---- what is asked


def test_sampling_is_what_the_authors_set(open_page, fake) -> None:
    page = open_page(fake.url)
    del fake.bodies[:]
    expect(page.locator("[name=top_p]")).to_have_attribute("placeholder", "0.9")
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.8")
    expect(page.locator("#sampling-origin")).to_have_text(
        "what the model's authors set (top p) and else forerun's default"
    )
    run(page, max_tokens=5, temperature="", seed="", beside=False)
    run(page, max_tokens=5, temperature=0, top_k=20, beside=False)
    empty, full = fake.bodies
    assert not {"temperature", "top_p", "top_k", "min_p"} & empty.keys() and isinstance(
        empty["seed"], int
    )
    assert (full["temperature"], full["top_k"]) == (0, 20) and "top_p" not in full


@pytest.mark.parametrize(("sampling", "temperature"), [({}, "0"), ({"temperature": 0.6}, "")])
def test_ready_prompts_say_what_to_expect(
    open_page, sampling: dict[str, float], temperature: str
) -> None:
    """One that copies asks for the likeliest text, unless the model's authors advise against
    that."""
    server = FakeServer(info=CHAT | {"sampling": sampling})
    page = open_page(server.url)
    buttons = page.locator("#ready button")
    expect(buttons.first).to_contain_text("most of the answer is in the prompt")
    expect(buttons.last).to_contain_text("nothing of the answer is in the prompt")
    assert "speculate" not in page.locator("#ready").inner_text(), (
        "that is measured, not known before"
    )
    buttons.first.click()
    assert "def total_price" in page.input_value("#prompt")
    assert page.input_value("[name=temperature]") == temperature
    expect(page.locator("#run")).to_be_focused()
    page.fill("#prompt", "my own")
    assert page.input_value("[name=temperature]") == ""
    buttons.last.click()
    assert page.input_value("[name=temperature]") == ""
    server.close()


def test_a_ready_prompt_says_what_it_was_measured_to_give(open_page, page_url) -> None:
    """It said "hardly speculates" whatever was drafted. Others, and runs without speculation,
    change nothing."""
    page = open_page(page_url)
    page.locator("#run:enabled").wait_for()
    labels = page.locator("#ready small")
    before = labels.all_inner_texts()
    page.locator("#ready button").last.click()
    run(page, draft="off", max_tokens=8)
    assert labels.all_inner_texts() == before
    page.locator("#ready button").last.click()
    run(page, draft="suffix", max_tokens=40, depth="2", temperature=0, beside=False)
    said = re.fullmatch(
        r"last run: (\d+\.\d\d) tokens a pass, (\d+) of (\d+) passes drafted",
        labels.last.inner_text(),
    )
    assert said and int(said[2]) <= int(said[3]) <= 40 and float(said[1]) >= 1
    assert f"in {said[3]} passes" in page.locator("#status").inner_text()
    assert labels.all_inner_texts()[:-1] == before[:-1]
    run(page, "something else", max_tokens=8)
    assert labels.last.inner_text() == said[0]


def test_a_wrong_field_out_of_sight_comes_into_sight(open_page, fake) -> None:
    page = open_page(fake.url)
    page.locator("#run:enabled").wait_for()
    page.fill("#prompt", "hello")
    page.fill("[name=temperature]", "9")
    page.click("#settings summary")
    expect(page.locator("[name=temperature]")).to_be_hidden()
    page.click("#run")
    expect(page.locator("[name=temperature]")).to_be_visible()


def test_what_is_for_experts_is_closed_at_first(open_page, fake) -> None:
    page = open_page(fake.url)
    page.reload()
    for name in ("#rounds", "#calculator", "#detail", "[name=rule]", "[name=temperature]"):
        expect(page.locator(name)).to_be_hidden()
    expect(page.locator("#lead")).to_contain_text("guesses")


# ---- beside plain decoding


def test_plain_decoding_beside_is_the_same_request(open_page, fake) -> None:
    page = open_page(fake.url)
    del fake.bodies[:]
    run(page, "hello", seed=7, temperature=0.3, max_tokens=90, depth=4)
    spec, plain = fake.bodies
    assert spec.pop("speculative") == {"draft": "suffix", "depth": 4, "rule": "match"}
    assert plain.pop("speculative") is False
    assert (
        spec == plain
        and spec["seed"] == 7
        and spec["temperature"] == 0.3
        and spec["max_tokens"] == 90
    )


def test_badge_and_speeds(open_page, page_url) -> None:
    page = open_page(page_url)
    spec, plain = map(traces, run(page))
    expect(page.locator("#badge")).to_have_text(f"Identical: all {len(plain)} token ids equal")
    speeds = [decoding_speed(spec), decoding_speed(plain)]
    for name, value in zip(["spec", "plain"], speeds, strict=True):
        assert abs(float(page.text_content(f"#compare-{name}").replace(",", "")) - value) <= 1
    assert page.text_content("#compare-ratio") == f"{speeds[0] / speeds[1]:.2f} {TIMES}"


def test_a_second_run_that_may_be_remembered_is_said_to_be(open_page) -> None:
    """Unless the server keeps the memory of requests with different salts apart."""
    server = FakeServer()
    page = open_page(server.url)
    for seed in (1, 2):  # at temperature 0, and often above, another seed says the same
        run(page, max_tokens=10, seed=seed)
    expect(page.locator("#caution")).to_contain_text("ran before")
    server.info = INFO | {"isolation": True}
    open_page(server.url)
    for _ in range(2):
        run(page, max_tokens=10)
    expect(page.locator("#caution")).to_be_hidden()
    salts = [body["cache_salt"] for body in server.bodies]
    assert [salts[i] == salts[i + 1] for i in range(7)] == [True, False] * 3 + [True]
    assert len(set(salts)) == 4 and all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts)
    server.close()


def decoding_speed(rounds: list[dict[str, Any]]) -> float:
    after = rounds[1:]
    return (
        1000
        * sum(len(r["tokens"]) for r in after)
        / sum(r["t_draft_ms"] + r["t_verify_ms"] for r in after)
    )


def test_a_difference_is_shown_where_it_is(open_page, fake) -> None:
    page = open_page(fake.url)
    run(page, "#fake: differ\n")
    badge = page.locator("#badge")
    expect(badge).to_contain_text("Different from token 5 on")
    expect(badge).to_contain_text("plain “␣else”")
    assert (
        page.eval_on_selector_all("#tokens .t", "ts => ts.findIndex(t => t.matches('.differs'))")
        == 5
    )
    expect(badge).to_have_class("badge different")
    run(page, rule="token")
    expect(badge).to_contain_text("promises the same distribution, not the same tokens")
    run(page, rule="typical")
    expect(badge).to_contain_text("lossy")


def test_figures_of_the_run(open_page, page_url) -> None:
    page = open_page(page_url)
    rounds = traces(run(page, beside=False)[0])
    tokens = sum(len(r["tokens"]) for r in rounds)
    expect(page.locator("#live-length")).to_have_text(f"{tokens / len(rounds):.2f}")
    draft, verify = (sum(r[f"t_{name}_ms"] for r in rounds[1:]) for name in ("draft", "verify"))
    expect(page.locator("#live-draft")).to_have_text(f"{100 * draft / (draft + verify):.0f} %")
    kept = [sum(n["accepted"] for n in r["draft"]) for r in rounds]
    bars = [
        f"{kept.count(i)} round{'' if kept.count(i) == 1 else 's'} with {i} accepted"
        for i in range(max(kept) + 1)
    ]
    assert page.eval_on_selector_all("#histogram li", "bars => bars.map(b => b.title)") == bars


def test_where_two_runs_differ(open_page, page_url) -> None:
    page = open_page(page_url)
    call = "([a, b]) => import('/playground/run.js').then((m) => m.firstDifference(a, b))"
    for a, b, at in [
        ([1, 2], [1, 2], -1),
        ([1, 2], [1], 1),
        ([1], [1, 2], 1),
        ([1, 2, 3], [1, 4, 3], 1),
        ([], [], -1),
    ]:
        assert page.evaluate(call, [a, b]) == at


def test_what_was_accepted_behind_the_end_of_a_request_is_said_to_be(open_page, page_url) -> None:
    draft = [{"parent": i, "accepted": True} for i in range(3)]
    call = "(round) => import('/playground/rounds.js').then((m) => [0, 1, 2].map((i) => m.fate(round, i)))"
    fates = open_page(page_url).evaluate(call, {"draft": draft, "tokens": [{}, {}]})
    assert fates == ["accepted", "accepted", "accepted, but the request ended before it"]


# ---- calculator


def expected_tokens(a: float, k: int) -> float:
    return k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def numbers(page: Page) -> tuple[str, str, str]:
    return tuple(page.text_content(f"#calc-{name}") for name in ("expected", "speedup", "best"))


def slide(page: Page, **values: float) -> None:
    for name, value in values.items():
        page.locator(f"#calc-{name}").fill(str(value))


def test_calculator_agrees_with_the_formula(open_page, page_url) -> None:
    page = open_page(page_url)
    page.locator("#run:enabled").wait_for()
    for a, k, c, v in [(0.81, 4, 0.05, 1.08), (0.5, 8, 0.2, 1.6), (1, 16, 0, 1), (0, 3, 0.1, 1.2)]:
        slide(page, k=k, a=a, c=c, v=v)
        curve = [
            expected_tokens(a, i) / (i * c + 1 + i * (v - 1) / k) for i in range(17)
        ]  # v grows evenly
        best = curve.index(max(curve))
        words = f"{best} ({curve[best]:.2f} {TIMES})" if best else "0: do not draft"
        assert numbers(page) == (f"{expected_tokens(a, k):.3f}", f"{curve[k]:.3f} {TIMES}", words)


def test_calculator_starts_from_what_was_measured(open_page, fake) -> None:
    page = open_page(fake.url)
    page.locator("#run:enabled").wait_for()
    c, v = 0.02 / 4 / 0.52, 0.7 / 0.52
    expect(page.locator("#calc-c-from")).to_have_text("measured")
    assert numbers(page)[1] == f"{expected_tokens(0.7, 4) / (4 * c + v):.3f} {TIMES}"
    rounds = traces(run(page, beside=False)[0])
    accepted = sum(n["accepted"] for r in rounds for n in r["draft"])
    cut_short = sum(any(not n["accepted"] for n in r["draft"]) for r in rounds)
    a = accepted / (
        accepted + cut_short
    )  # a draft accepted to its end tells nothing of what would have come
    k = round(
        sum(len(r["draft"]) for r in rounds[1:]) / len(rounds[1:])
    )  # chains: as many levels as tokens
    expect(page.locator("#calc-a-from")).to_have_text("from the last run")
    expect(page.locator("#calc-k-value")).to_have_text(str(k))
    assert numbers(page)[0] == f"{expected_tokens(a, k):.3f}"
    slide(page, k=4, v=2)
    expect(page.locator("#calc-v-from")).to_have_text("set by hand")
    page.click("#calc-reset")
    assert numbers(page)[1] == f"{expected_tokens(a, 4) / (4 * c + v):.3f} {TIMES}"


def test_calculator_without_measurements(open_page) -> None:
    server = FakeServer(info=INFO | {"costs": {}})
    page = open_page(server.url)
    page.locator("#run:enabled").wait_for()
    expect(page.locator("#calc-c-from")).to_have_text("assumed")
    assert numbers(page)[1] == f"{expected_tokens(0.7, 4) / (4 * 0.05 + 1.08):.3f} {TIMES}"
    run(page, max_tokens=10)
    expect(page.locator("#caution")).to_contain_text("had yet to measure")
    server.close()


@pytest.mark.parametrize(
    "table", [{1: 0.5, 5: 0.7, 9: 4.0}, {3: 1.0}, {2: 0.8, 4: 0.6}, {16: 1.0, 24: 1.1}]
)
def test_costs_are_read_as_the_depth_policy_reads_them(
    open_page, page_url, table: dict[int, float]
) -> None:
    """Of passes and of drafts, between what was measured and far beyond it."""
    learned = Costs()
    for size, cost in table.items():
        for _ in range(SETTLED):
            learned.add_pass(size, cost)
            learned.add_draft("model", size, cost)
    call = (
        "(args) => import('/playground/calculator.js').then((m) => m.measured(args[0], 'model'))"
        ".then((m) => args[1].map((x) => [m.pass(x), m.draft(x)]))"
    )
    sizes, named = list(range(1, 32)), {str(size): cost for size, cost in table.items()}
    read = open_page(page_url).evaluate(
        call, [{"pass_ms": named, "draft_ms": {"model": named}}, sizes]
    )
    for size, (passing, drafting) in zip(sizes, read, strict=True):
        assert passing / learned.of_pass(size) == pytest.approx(1, rel=0.01), size
        assert drafting / learned.of_draft("model", size) == pytest.approx(1, rel=0.01), size


# ---- what goes wrong


def test_a_missing_or_wrong_key_is_asked_for(open_page) -> None:
    server = FakeServer(key="secret")
    page = open_page(server.url)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_contain_text("an API key is needed")
    page.fill("#key", "wrong")
    page.click("#key-dialog .primary")
    expect(page.locator("#key")).to_have_value("")  # it asks again
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    run(page, max_tokens=10, beside=False)
    assert len(shown_tokens(page)) == 10
    page.reload()
    expect(page.locator("#run")).to_be_enabled()  # kept for the tab
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    server.close()


def test_no_key_is_an_error_on_the_page(open_page) -> None:
    server = FakeServer(key="secret")
    page = open_page(server.url)
    page.locator("#key-dialog").wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("#error")).to_have_text("an API key is needed")
    server.close()


def test_refusals_and_errors_are_shown(open_page, fake) -> None:
    page = open_page(fake.url)
    error = page.locator("#error")
    run(page, "#fake: refuse\n")
    expect(error).to_have_text(
        "max_tokens must be at most 2048: the context is <no longer> than that (max_tokens)"
    )
    run(page, "#fake: break\n")
    expect(error).to_have_text("the model ran out of <memory>")
    assert shown_tokens(page)  # what came before stays
    run(page, "#fake: cut\n")
    expect(error).to_have_text("the stream ended before it was complete")
    run(page, "hello", max_tokens=5)
    expect(error).to_be_hidden()


def test_a_server_that_is_gone_is_said_to_be(open_page) -> None:
    server = FakeServer()
    page = open_page(server.url)
    page.locator("#run:enabled").wait_for()
    server.close()
    run(page)
    expect(page.locator("#error")).to_contain_text("the connection to the server failed")


def test_stop(open_page, fake) -> None:
    page = open_page(fake.url)
    aborted = fake.aborted
    run(page, "#fake: slow\n", wait=False)
    page.locator("#tokens .t").nth(5).wait_for()
    page.click("#stop")
    expect(page.locator("#status")).to_contain_text("Stopped after")
    assert 5 < len(shown_tokens(page)) < 160
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#compare")).to_be_hidden()
    page.wait_for_timeout(200)
    assert fake.aborted == aborted + 1


def test_stop_while_plain_decoding_compares_what_there_is(open_page, fake) -> None:
    page = open_page(fake.url)
    run(page, "#fake: slow\n", wait=False, max_tokens=40)
    expect(page.locator("#status")).to_contain_text("the same without speculation")
    page.wait_for_timeout(300)
    page.click("#stop")
    expect(page.locator("#badge")).to_have_text(
        re.compile(r"Identical: the first \d+ token ids? equal")
    )
    page.click("#replay")
    expect(page.locator("#status")).to_have_text("Played again.")


def test_events_cut_anywhere_are_read_whole(open_page, page_url) -> None:
    page = open_page(page_url)
    text = 'data: {"a": 1}\r\n\r\n: comment\r\ndata:two\ndata: lines\n\nevent: x\rdata: é\r\rdata: open'
    call = """([text, size]) => import('/playground/api.js').then(({ sseParser }) => {
        const got = [];
        const feed = sseParser((data) => got.push(data));
        for (let i = 0; i < text.length; i += size) feed(text.slice(i, i + size));
        return got;
    })"""
    for size in (1, 2, 3, 7, 1000):
        assert page.evaluate(call, [text, size]) == ['{"a": 1}', "two\nlines", "é"]


# ---- the page itself


def test_keyboard_alone_will_do(open_page, page_url) -> None:
    page = open_page(page_url)
    page.locator("#run:enabled").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first ready prompt, which moves on to Run
    page.keyboard.press("Enter")
    page.locator("#badge").wait_for()
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.locator("#stop:enabled").wait_for()
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
    assert reached.index("plain-output") < reached.index("replay") < reached.index("prompt")
    assert {"ghosts", "run", "rounds", "round-slider", "round-first", "calc-a", "calc-k"} <= set(
        reached
    )


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("width", [320, 375, 390, 1280])
def test_no_width_scrolls_sideways(open_page, fake, chatting, width: int, chat: bool) -> None:
    page = open_page(chatting.url if chat else fake.url, width)
    run(page, "#fake: differ\n" + "y" * 300)  # in a chat, an earlier turn
    run(page, "#fake: differ\n" + "x" * 300, draft="model:tiny", depth=6, rule="tree")
    page.check("#ghosts")
    page.click("#round-next")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = "es => es.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1).map(e => e.id || e.className)"
    assert page.eval_on_selector_all("main div, main section, main table, main p", wide) == []


def test_every_control_has_a_name(open_page, page_url) -> None:
    page = open_page(page_url)
    names = "es => es.filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()))"
    assert (
        page.eval_on_selector_all("input, select, textarea, button", names + ".map(e => e.id)")
        == []
    )


def test_motion_only_where_it_is_wanted(open_page, page_url) -> None:
    moves = "getComputedStyle(document.getElementById('live-share')).transitionDuration"
    assert open_page(page_url, reduced_motion="reduce").evaluate(moves) == "0s"
    assert open_page(page_url, reduced_motion="no-preference").evaluate(moves) != "0s"


def test_both_colour_schemes_can_be_read(open_page, page_url) -> None:
    """Contrast of each colour of text against the paper is at least 4.5, of underlines at least
    3."""
    names = [
        "ink",
        "quiet",
        "accent",
        "bad",
        "src-0",
        "src-1",
        "src-2",
        "src-3",
        "src-4",
        "paper",
        "panel",
    ]
    call = "names => names.map((n) => getComputedStyle(document.documentElement).getPropertyValue(`--${n}`).trim())"
    for scheme in ("light", "dark"):
        *inks, paper, panel = open_page(page_url, color_scheme=scheme).evaluate(call, names)
        for i, ink in enumerate(inks):
            assert min(contrast(ink, paper), contrast(ink, panel)) >= (4.5 if i < 4 else 3), (
                scheme,
                ink,
            )


def contrast(a: str, b: str) -> float:
    """WCAG's ratio of two colours written #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def test_nothing_from_elsewhere_and_nothing_inline(open_page, page_url) -> None:
    page = open_page("about:blank")
    asked: list[str] = []

    def note(request: Any) -> None:
        asked.append(request.url)

    page.on("request", note)
    headers = page.goto(page_url).all_headers()
    page.click("#settings summary")
    run(page, beside=False, max_tokens=20)
    page.remove_listener("request", note)
    assert all(url.startswith((page_url, "data:")) for url in asked)
    policy = headers["content-security-policy"]
    assert all(directive in policy for directive in CSP.split("; "))
    assert "unsafe" not in policy
    assert page.locator("script:not([src]), style, [onclick]").count() == 0

"""The page in a real headless Chromium: `make test-browser`. Skipped without a browser, its driver, or selenium."""

import shutil

import numpy as np
import pytest

from grail_lightning.views import write_page
from grail_lightning.views.pictures import LARGEST, colour_of
from tests.views.made import rollout, write
from tests.views.test_page import HOSTILE, _played

selenium = pytest.importorskip("selenium", reason="needs selenium: pip install 'grail-lightning[browser]'")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="needs chromium and chromedriver on the PATH"),
]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ALL = "document.querySelectorAll('.group').forEach(fill); document.querySelectorAll('.rollout').forEach(fill)"
FLAGS += ["--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def show(chromium, tmp_path):
    """Opens a page of rollouts in a window of some size; afterwards there must be no message in the console."""

    def opened(rows, width=1200, height=900, scheme="light", compared=()):
        page = tmp_path / "page.html"
        write_page(write(tmp_path / "p.parquet", rows, compared), page)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        media = [{"name": name, "value": value} for name, value in wanted.items()]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        chromium.get(page.as_uri())
        assert chromium.execute_script("return document.documentElement.dataset.ready")
        chromium.execute_script(ALL)  # All, wherever the window is.
        return chromium

    yield opened
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return performance.getEntriesByType('resource').map((r) => r.name)") == []


def _group(**columns):
    """Two right rollouts, a wrong one that parts at `13`, and one that parts at the beginning."""
    right = ["7+5", "=", "12", "\n", "\\boxed{12}", "<end>"]
    wrong = ["7+5", "=", "13", "\n", "\\boxed{13}", "<end>"]
    other = ["So", "\n", "\\boxed{1}", "<end>"]
    labels = {"step_starts": [0], "step_stops": [6], "step_kinds": ["slip"]}
    marks = {"box_first_token": 4, "box_last_token": 4}
    rows = [rollout(right, correct=True, **marks), rollout(wrong, **marks, **labels), rollout(other)]
    return [row | columns for row in (*rows, rollout(right, correct=True, **marks))]


def _tokens(driver, rollout_number=1, method=0):
    find = f"return [...document.querySelectorAll('[data-number=\"{rollout_number}\"] .tokens')][{method}]"
    return driver.execute_script(f"{find}.querySelectorAll('.t')")


def _tip(driver):
    tip = driver.find_element("id", "tip")
    return tip.text if tip.is_displayed() else None


def test_turns_are_boxes_and_what_was_not_sampled_is_grey(show):
    driver = show([_played("<b>sea</b>"), rollout(["z"], correct=True)])
    boxes = driver.execute_script("return [...document.querySelectorAll('.turn')].map((t) => t.innerText)")
    assert len(boxes) == 2
    assert "turn 1 · score 0.5 · advantages: sum -2, mean -2" in boxes[0]
    assert "<b>sea</b>: done" in boxes[0]
    assert "call: invalid" in boxes[0]
    assert "turn 2 · advantages: sum -5.4, mean -2.7" in boxes[1]
    told = driver.execute_script("return [...document.querySelectorAll('.tokens .told')].map((t) => t.textContent)")
    assert told == ["<b>sea</b>", "!"]
    widths = "return [...document.querySelectorAll('.turn')].map((t) => getComputedStyle(t).borderLeftWidth)"
    assert driver.execute_script(widths) == ["3px"] * 2
    # The keyboard goes on into the next turn.
    driver.execute_script("focusToken(arguments[0])", _tokens(driver)[2])
    assert "put in by the environment, not trained" in _tip(driver)
    ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert driver.switch_to.active_element == _tokens(driver)[3]
    assert "token 4 of 5" in _tip(driver)


def test_a_weight_has_the_colour_of_the_pictures(show):
    weights = [-1.0, 0.0, 0.25, 0.9, 1.0, 1.1, 2.0, 5.0, 40.0]
    driver = show([rollout(list("abcdefghi"), weights=weights)])
    tokens = "[...document.querySelectorAll('.tokens .t')]"
    kinds = driver.execute_script(f"return {tokens}.map((t) => t.matches('.more') - t.matches('.less'))")
    assert kinds == [-1, -1, -1, -1, 0, 1, 1, 1, 1]
    parts = driver.execute_script(f"return {tokens}.map((t) => parseFloat(t.style.getPropertyValue('--part')))")
    blue, orange = (np.array(colour_of(weight), dtype=float) for weight in (0.0, LARGEST))
    for weight, part in zip(weights, parts, strict=True):
        painted = 255 + part / 100 * ((orange if weight > 1 else blue) - 255)
        assert painted == pytest.approx(np.array(colour_of(weight)), abs=0.6)


def test_hovering_shows_the_values_of_a_token(show):
    driver = show(_group(**{"weights.Other": [7.5] * 6, "scores.Other": None}), compared=["Other"])
    assert _tip(driver) is None
    ActionChains(driver).move_to_element(_tokens(driver, 2)[2]).perform()
    shown = _tip(driver)
    assert shown.startswith("13\ntoken 3 of 6 · wrong step (slip) · after it no rollout of the group was right")
    assert "GRAIL 1.2 0.003" in shown
    assert "Other 7.5 \N{EN DASH}" in shown
    same = driver.execute_script("return [...document.querySelectorAll('.same')].map((t) => t.textContent)")
    assert same == ["13"], "the other method's token is marked, too"
    ActionChains(driver).move_to_element(driver.find_element("tag name", "h1")).perform()
    assert _tip(driver) is None


def test_the_keyboard_reaches_every_token_and_shows_its_values(show):
    driver = show(_group())
    focused = "return document.activeElement.matches('.t')"
    for _ in range(30):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        if driver.execute_script(focused):
            break
    first = _tokens(driver)[0]
    assert driver.switch_to.active_element == first
    assert "token 1 of 6" in _tip(driver)
    assert first.get_attribute("aria-label") == "7+5, weight 1"
    steps = {Keys.ARROW_RIGHT: "token 2 of 6", Keys.END: "token 6 of 6", Keys.ARROW_LEFT: "token 5 of 6"}
    for key, said in (*steps.items(), (Keys.HOME, "token 1 of 6"), (Keys.ARROW_LEFT, "token 1 of 6")):
        ActionChains(driver).send_keys(key).perform()
        assert said in _tip(driver)
    ActionChains(driver).send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.END).perform()
    assert driver.switch_to.active_element == _tokens(driver, 3)[-1]
    outline = driver.execute_script("return getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px", "the focus can be seen"
    ActionChains(driver).send_keys(Keys.ENTER).move_to_element(_tokens(driver, 1)[0]).perform()
    assert "token 4 of 4" in _tip(driver), "Enter keeps the values while the pointer moves"
    ActionChains(driver).send_keys(Keys.ESCAPE).perform()
    assert _tip(driver) is None
    # One stop for each list of tokens: Tab leaves it.
    ActionChains(driver).send_keys(Keys.TAB).perform()
    assert driver.switch_to.active_element == _tokens(driver, 4)[0]


@pytest.mark.parametrize("width", [1200, 375])
def test_hostile_text_stays_text(show, width):
    rows = [rollout([text, " end"], prompt=f"{k} {text}", reference=text) for k, text in enumerate(HOSTILE)]
    driver = show(rows, width)
    assert driver.title.startswith("Token credit: ")
    assert driver.execute_script("return [document.scripts.length, document.images.length]") == [2, 0]
    shown = driver.execute_script(
        "return [...document.querySelectorAll('.tokens')].map((p) => p.querySelector('.t').textContent)"
    )
    pictures = [text.replace("\x00", "\u2400").replace("\x1b", "\u241b") for text in HOSTILE]
    assert shown == pictures
    prompts = driver.execute_script("return [...document.querySelectorAll('.prompt')].map((p) => p.textContent)")
    assert prompts == [f"{k} {text}" for k, text in enumerate(pictures)]
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    # What turns the direction of text does so inside its token alone.
    lefts = driver.execute_script(
        "return [...document.querySelectorAll('.tokens')].map("
        "(p) => [...p.children].map((t) => t.getClientRects()[0].left))"
    )
    assert lefts[3][0] < lefts[3][1]
    ActionChains(driver).move_to_element(_tokens(driver, 6)[1]).perform()
    driver.execute_script("focusToken(arguments[0])", _tokens(driver, 6)[0])
    assert len(_tip(driver)) < 400, "a word of 10,000 characters is cut where its values are shown"


def test_the_tree_shows_success_rates_and_leads_to_the_fork(show):
    driver = show(_group())
    rows = driver.execute_script("return [...document.querySelectorAll('.node')].map((n) => n.innerText)")
    rows = [[part.strip() for part in row.split("\n")] for row in rows]
    assert [row[0] for row in rows] == ["2/4", "2/3", "2/2", "0/1", "0/1"]
    # The task labels the step at `13` as a slip; nothing but one wrong rollout speaks against `So`.
    assert ["fork" in row for row in rows] == [False, False, False, True, False]
    assert rows[1][1:] == ["7+5="]
    assert rows[2][1:] == ["12↵\\boxed{12}<end>", "#1 ✓", "#4 ✓"]
    assert rows[3][1:] == ["fork", "13↵\\boxed{13}<end>", "#2 ✗"]
    driver.find_element("css selector", ".node button.wrong").click()
    assert driver.switch_to.active_element == _tokens(driver, 2)[2]
    assert "forks" in driver.switch_to.active_element.get_attribute("class")


def test_sorting_and_filtering(show):
    rows = [row | {"prompt": "mixed"} for row in _group()]
    rows += [rollout(["easy one"], prompt="right", correct=True), rollout(["hard one"], prompt="wrong")]
    driver = show(rows)

    def chosen(**values):
        for name, value in values.items():
            driver.execute_script(
                "const e = byId(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('change'));",
                name,
                value,
            )
        driver.execute_script(f"draw(); {ALL}")
        return driver.execute_script(
            "return [[...document.querySelectorAll('.prompt')].map((p) => p.textContent),"
            " [...document.querySelectorAll('.rollout')].map((r) => Number(r.dataset.number))]"
        )

    assert chosen() == [["mixed", "right", "wrong"], [1, 2, 3, 4, 5, 6]]
    assert chosen(sort="hard") == [["wrong", "mixed", "right"], [6, 1, 2, 3, 4, 5]]
    assert chosen(sort="easy", outcome="wrong") == [["mixed", "wrong"], [2, 3, 6]]
    assert driver.find_element("id", "shown").text == "3 rollouts of 2 problems match."
    assert chosen(outcome="mixed") == [["mixed"], [1, 2, 3, 4]]
    assert chosen(outcome="all", find="HARD") == [["wrong"], [6]]
    # The tree leads to a rollout that the filter leaves out.
    assert chosen(find="", outcome="right", sort="number")[1] == [1, 4, 5]
    driver.execute_script("document.querySelector('.node button.wrong').click()")
    assert driver.switch_to.active_element == _tokens(driver, 2)[2]


def test_methods_side_by_side_can_be_switched_off(show):
    driver = show(_group(**{"weights.Other": [0.0] * 6, "scores.Other": [1.0] * 6}), compared=["Other"])
    tops = driver.execute_script(
        "return [...document.querySelectorAll('[data-number=\"1\"] figure')].map((f) => f.getBoundingClientRect().top)"
    )
    assert len(tops) == 2
    assert tops[0] == tops[1]
    driver.find_elements("css selector", "#methods input")[0].click()
    driver.execute_script(ALL)
    captions = driver.execute_script("return [...document.querySelectorAll('figcaption')].map((f) => f.textContent)")
    assert captions == ["Other"] * 4


def _linear(colour):
    """sRGB of 0 to 255 as linear light."""
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour[:3])]


def _contrast(one, other):
    """The contrast ratio of WCAG 2."""
    light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 for r, g, b in map(_linear, (one, other)))
    return light[1] / light[0]


# Linear RGB as people without one kind of cones see it (Machado et al. 2009, severity 1).
BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_colour_and_colours_stay_apart(show, scheme):
    tokens = ["least", "one", "most", "<end>"]
    row = rollout(tokens, weights=[0.0, 1.0, 9.0, 9.0], correct=True, token_stops=[5, 8, 12, 12])
    row |= {"token_starts": [0, 5, 8, 12], "response": "leastonemost"}
    driver = show([row], scheme=scheme)
    # The colours as they are painted: a canvas resolves `color-mix`, on the card that lies below.
    painted = driver.execute_script(
        """
        const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const seen = (...layers) => {
          paint.clearRect(0, 0, 1, 1);
          for (const layer of layers) { paint.fillStyle = layer; paint.fillRect(0, 0, 1, 1); }
          return [...paint.getImageData(0, 0, 1, 1).data];
        };
        const card = getComputedStyle(document.querySelector(".rollout")).backgroundColor;
        return [...document.querySelectorAll(".tokens .t")].map((t) => {
          const style = getComputedStyle(t);
          return [seen(style.color), seen(card, style.backgroundColor)];
        });
        """
    )
    backs = [back for _, back in painted]
    for (ink, back), name in zip(painted, tokens, strict=True):
        assert _contrast(ink, back) >= 4.5, (name, ink, back)
    least, middle, most = backs[:3]
    for matrix in BLIND.values():
        seen = [[sum(m * v for m, v in zip(row, _linear(c), strict=True)) for row in matrix] for c in backs[:3]]
        pairs = ((seen[0], seen[2]), (seen[0], seen[1]), (seen[1], seen[2]))
        for one, other in pairs:
            assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 0.08, (least, middle, most)


def test_the_theme_can_be_chosen(show):
    driver = show(_group())
    back = "return getComputedStyle(document.body).backgroundColor"
    light = driver.execute_script(back)
    button = driver.find_element("id", "theme")
    button.click()
    assert driver.execute_script(back) == light
    button.click()
    assert button.text == "Theme: dark"
    assert driver.execute_script(back) != light


def test_a_phone_shows_all_of_it_without_scrolling_sideways(show):
    rows = _group(**{"weights.Other": [0.0] * 6, "scores.Other": [1.0] * 6})
    driver = show(rows + 30 * rows[-1:], 375, 700, compared=["Other"])
    assert driver.execute_script("return document.documentElement.scrollWidth") == 375
    assert (
        driver.execute_script("return parseFloat(getComputedStyle(document.querySelector('.tokens')).fontSize)") >= 16
    )
    lefts = driver.execute_script(
        "return [...document.querySelectorAll('[data-number=\"1\"] figure')].map((f) => f.getBoundingClientRect().left)"
    )
    assert lefts[0] == lefts[1], "methods lie below each other"
    driver.execute_script("arguments[0].click()", _tokens(driver, 2)[2])
    box = driver.execute_script("const r = byId('tip').getBoundingClientRect(); return [r.left, r.right, r.bottom]")
    assert "token 3 of 6" in _tip(driver)
    assert 0 <= box[0] < box[1] <= 375
    assert box[2] <= 700


def test_two_hundred_long_rollouts_are_there_at_once(chromium, tmp_path, capsys):
    def row(number):
        tokens = [f" w{(k * 7919 + number * 104729) % 30000}" for k in range(512)]
        values = [((k * 31 + number) % 997) / 199.7 for k in range(512)]
        more = {f"{column}.{name}": values for name in "AB" for column in ("weights", "scores")}
        return rollout(tokens, f"problem {number // 8}", number % 3 == 0, weights=values, scores=values, **more)

    page = tmp_path / "page.html"
    write_page([write(tmp_path / "p.parquet", [row(k) for k in range(200)], ["A", "B"])], page)
    chromium.get(page.as_uri())
    chromium.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 0))")
    usable = chromium.execute_script("return Number(document.documentElement.dataset.ready)")
    elements, tokens = chromium.execute_script(
        "return [document.querySelectorAll('*').length, document.querySelectorAll('.t').length]"
    )
    with capsys.disabled():
        print(f"\n{page.stat().st_size / 1e6:.2f} MB, {usable:.0f} ms until usable, {elements} elements")
    assert page.stat().st_size < 5e6
    assert 512 <= tokens < elements < 20_000, "what is far from the window is drawn when it comes near"
    chromium.execute_script("window.scrollTo(0, document.body.scrollHeight)")
    chromium.execute_async_script("setTimeout(arguments[0], 500)")
    assert (
        chromium.execute_script("return document.querySelectorAll('.group:last-child .rollout:last-child .t').length")
        == 3 * 512
    )
    assert chromium.get_log("browser") == []

"""The page in a real headless Chromium: `make test-browser`. Skipped without a browser, its driver, or selenium."""

import shutil

import numpy as np
import pytest

from grail_lightning import write_page
from grail_lightning.app.views.heatmap import LARGEST, colour_of
from tests.app.views.made import rollout, write
from tests.app.views.test_page import HOSTILE, _played

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
        # Without it no event tells of the focus until the window has been clicked (seen with Chromium 150).
        chromium.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
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

"""The page of attention in a real browser, without a screen: it loads, reacts, says nothing to its console, asks nobody.

Needs chromium, chromedriver and selenium: `make test-page`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_synthesizer import attention_page, patch_model
from tests.helpers.models import build, randomize
from tests.pictures.test_pictures import NASTY, words

pytestmark = pytest.mark.page

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,1000",
)
TEXTS = ("the film the film the film", f"the {NASTY} film")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    stock = randomize(build("BertForSequenceClassification", num_attention_heads=4), std=0.3)
    model = patch_model(copy.deepcopy(stock.eval()), {0: "random", 1: "dense+salience"}, max_length=16)
    randomize(model.bert.encoder.layer[0].attention.self.synthesizer, std=1.5)
    path = tmp_path_factory.mktemp("page") / "attention.html"
    path.write_text(attention_page(model, TEXTS, stock, tokenizer=words(NASTY), title=NASTY), encoding="utf-8")
    return path


@pytest.fixture
def browser(page: Path, tmp_path: Path) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.binary_location = program("CHROMIUM", "chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(program("CHROMEDRIVER", "chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.get(page.as_uri())
        yield driver
    finally:
        driver.quit()


def program(variable: str, name: str) -> str:
    """Where it is; selenium would look for one in a network."""
    found = shutil.which(os.environ.get(variable, name))
    assert found, f"{name} is not installed: make test-page says what it needs"
    return found


def captions(browser: Any) -> list[str]:
    """What each side says of the token that was touched."""
    return [element.text for element in browser.find_elements("css selector", ".caption")]


def selected(browser: Any, name: str) -> str:
    return browser.execute_script(
        f"const box = document.getElementById({name!r}); return box.options[box.selectedIndex].text"
    )


def painted(browser: Any) -> str:
    """The pixels of the first map."""
    return browser.execute_script("return document.querySelector('#sides canvas').toDataURL()")


def press(browser: Any, key: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(key).perform()


def test_a_browser_shows_the_page_and_asks_nobody(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    # It loads, with stock attention beside the synthesized one.
    headings = [element.text for element in browser.find_elements("css selector", "main h2")]
    assert headings == ["random model, encoder.0", "stock teacher, encoder.0"]
    assert "Looks" in browser.find_element("css selector", "#learnt figcaption").text
    first = painted(browser)

    # A click and a key change the head.
    browser.find_element("css selector", "button[data-of=head][data-by='1']").click()
    assert selected(browser, "head") == "1" and painted(browser) != first
    browser.execute_script("document.activeElement.blur()")
    press(browser, Keys.ARROW_RIGHT)
    assert selected(browser, "head") == "2"
    press(browser, Keys.ARROW_LEFT)
    press(browser, Keys.ARROW_LEFT)
    press(browser, Keys.ARROW_LEFT)  # there is none before the first
    assert selected(browser, "head") == "0" and painted(browser) == first

    # To point at a token, or to touch it, shows where it looks.
    tokens = browser.find_elements("css selector", ".tokens button")
    ActionChains(browser).move_to_element(tokens[3]).perform()
    assert all(text.startswith("“film” looks at") and "%" in text for text in captions(browser))
    browser.execute_script(
        "arguments[0].dispatchEvent(new PointerEvent('pointerdown', {pointerType: 'touch'}))", tokens[0]
    )
    assert all(text.startswith("“the” looks at") for text in captions(browser))
    press(browser, "d")
    assert tokens[1].get_attribute("aria-pressed") == "true"
    canvas = browser.find_element("css selector", "#sides canvas")
    ActionChains(browser).move_to_element_with_offset(canvas, 0, canvas.size["height"] // 2 - 5).perform()
    assert tokens[5].get_attribute("aria-pressed") == "true"
    if os.environ.get("SCREENSHOTS"):
        browser.save_screenshot(str(Path(os.environ["SCREENSHOTS"]) / "page.png"))

    # Another layer, another text; what it contains is shown and not run.
    press(browser, Keys.ARROW_DOWN)
    assert selected(browser, "layer") == "encoder.1 · dense+salience"
    press(browser, Keys.PAGE_DOWN)
    assert [
        element.text for element in browser.find_elements("css selector", "main section:first-child .tokens button")
    ] == [
        "the",
        NASTY,
        "film",
    ]
    assert browser.title == NASTY and not browser.find_elements("css selector", "img")
    if os.environ.get("SCREENSHOTS"):
        browser.save_screenshot(str(Path(os.environ["SCREENSHOTS"]) / "page-nasty.png"))

    # Its console is silent, and no request leaves it.
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    asked = {request["request"]["url"] for request in requests if request["documentURL"] == page.as_uri()}
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    assert not [request for request in requests if request["request"]["url"].startswith(("http", "ws"))]
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0

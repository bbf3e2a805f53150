"""The page in a real browser (Debian's chromium, headless): write, watch, stop, take another token, change settings."""

import shutil
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("NOT RUN: the page in a browser: chromium and chromedriver are not installed (make browser)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1100,900",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def wait(condition, seconds: float = 30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def test_a_text_is_written_watched_stopped_and_changed(browser, server, engine, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from serving import BYTES

    from tokenformer.infer import Sampling, write_texts

    def get(name: str):
        return browser.find_element(By.ID, name)

    def tokens() -> list[str]:
        return browser.execute_script("return [...document.querySelectorAll('#text .token')].map(e => e.textContent)")

    def set_value(name: str, value: object) -> None:
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        browser.execute_script(script, get(name), str(value))

    def alone(ids: list[int], n: int, how: Sampling | None = None, seed: int = 0) -> list[int]:
        return engine.generate([ids], n, how, seeds=[seed], stop_ids=[BYTES.end_of_document])[0].ids

    browser.get(server.url)
    wait(lambda: get("status").text == "ready")
    assert browser.switch_to.active_element == get("prompt")  # the keyboard is enough
    assert not get("locked").is_displayed()  # no key is needed here
    prompt = "Once upon"
    set_value("tokens", 20)
    set_value("temperature", 0)
    get("prompt").send_keys(prompt)
    get("prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    wait(lambda: get("status").text.startswith("20 tokens"))
    greedy = alone(BYTES.encode(prompt), 20)
    assert "".join(tokens()) == BYTES.decode(greedy)

    # another token in the place of the third, by the keyboard: the text goes on from there
    get("text").send_keys(Keys.ARROW_RIGHT * 3)
    lines = browser.find_elements(By.CSS_SELECTOR, "#others li")
    assert len(lines) >= 8 and "%" in lines[0].text
    browser.save_screenshot(str(tmp_path / "light.png"))
    get("text").send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    wait(lambda: get("status").text.startswith("20 tokens") and len(tokens()) == 23)
    script = "return tokens.map(t => t.id)"
    ids = browser.execute_script(script)
    assert ids[:2] == greedy[:2] and ids[2] != greedy[2]
    assert ids[3:] == alone(BYTES.encode(prompt) + ids[:3], 20)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".token.chosen")) == 1

    # another temperature, with a seed
    set_value("temperature", 1.5)
    set_value("seed", 11)
    assert get("warmth").text == "1.50"
    get("write").click()
    wait(lambda: get("status").text.startswith("20 tokens") and len(tokens()) == 20)
    (drawn,) = write_texts(engine, BYTES, [prompt], 20, Sampling(temperature=1.5), seeds=[11])
    assert browser.execute_script(script) == drawn.ids and drawn.ids != greedy

    # stop in the middle
    set_value("tokens", 240)
    get("write").click()
    wait(lambda: len(tokens()) >= 3)
    get("prompt").send_keys(Keys.ESCAPE)
    wait(lambda: get("status").text.startswith("stopped after"))
    assert 3 <= len(tokens()) < 240
    wait(lambda: server.metric("running") == 0)

    # a mistake is said in the words of the page, and leaves the text as it was
    kept = tokens()
    for name, value, sentence in (
        ("tokens", 100000, "tokens is 100,000"),
        ("tokens", 0, "tokens is 0"),
        ("top_p", 2, "top-p is 2"),
    ):
        set_value(name, value)
        get("write").click()
        wait(lambda sentence=sentence: sentence in get("status").text)
        assert "wrong" in (get("status").get_attribute("class") or "") and tokens() == kept
        set_value(name, 1)

    # at the end of the context as many are written as fit, and then none
    set_value("temperature", 0)
    set_value("tokens", 200)
    get("write").click()
    wait(lambda: get("status").text.startswith("200 tokens"))
    get("on").click()
    wait(lambda: get("status").text.endswith("the context is full"))
    assert len(tokens()) == engine.context - len(prompt)
    get("on").click()
    wait(lambda: "as many as the model's context" in get("status").text)
    assert len(tokens()) == engine.context - len(prompt)

    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    set_value("tokens", 20)
    get("write").click()
    wait(lambda: len(tokens()) == 20)
    get("text").send_keys(Keys.ARROW_RIGHT * 5)
    browser.save_screenshot(str(tmp_path / "dark.png"))
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(21, 24, 27)"
    assert all(Path(tmp_path / name).stat().st_size > 10_000 for name in ("light.png", "dark.png"))
    errors = [e for e in browser.get_log("browser") if e["level"] == "SEVERE" and "400" not in e["message"]]
    assert errors == []

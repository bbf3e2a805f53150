"""The page of an explored model in a real browser (Debian's chromium, headless): search, a card, the text view."""

import pytest

from tests.inside.test_inside import folder, looked  # noqa: F401 (fixtures)
from tests.serve.test_page import browser, wait  # noqa: F401 (fixture)
from tokenformer.cli.main import main

pytestmark = pytest.mark.browser


def test_texts_that_are_not_ascii_and_words_of_several_tokens(browser, folder, tmp_path):  # noqa: F811
    from selenium.webdriver.common.by import By

    text = "Ein Café in 北京, " * 60
    (tmp_path / "text.txt").write_text(text)
    words = ["--text", str(tmp_path / "text.txt"), "--sample", "40", "--out", str(tmp_path / "looked")]
    assert main(["explore", str(folder / "model"), *words]) == 0
    browser.set_window_size(500, 900)
    browser.get(f"file://{tmp_path / 'looked' / 'index.html'}")
    wait(lambda: browser.find_element(By.TAG_NAME, "body").get_attribute("data-ready") == "yes")
    query, found = browser.find_element(By.ID, "query"), browser.find_element(By.ID, "found")
    for word in ("北京", "Café", "Ei"):
        query.clear()
        query.send_keys(word)
        wait(lambda: found.find_elements(By.TAG_NAME, "button"))[0].click()
        marked = browser.find_elements(By.CSS_SELECTOR, "#card .ctx")
        assert any(word in place.text for place in marked) and "bytes:" not in found.text
    query.clear()
    query.send_keys("/[/")
    assert "Invalid regular expression" in found.text
    shown = "".join(word.text for word in browser.find_elements(By.CSS_SELECTOR, "#text button"))
    assert shown.replace("·", "").replace(" ", "") in text.replace(" ", "")
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= browser.execute_script("return window.innerWidth")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_search_card_and_text_view_answer(browser, looked, tmp_path):  # noqa: F811
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.set_window_size(1250, 1800)
    browser.get(f"file://{looked / 'index.html'}")
    wait(lambda: browser.find_element(By.TAG_NAME, "body").get_attribute("data-ready") == "yes")
    assert len(browser.find_elements(By.TAG_NAME, "canvas")) == 2 * 5
    browser.find_element(By.ID, "query").send_keys("q")
    found = wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#found button"))
    name = found[0].text.split()[0]
    found[0].click()
    card = browser.find_element(By.ID, "card")
    assert card.get_attribute("data-token") == name and "fires in" in card.text
    assert "q" in [place.text for place in browser.find_elements(By.CSS_SELECTOR, "#card .ctx b")]
    words = browser.find_elements(By.CSS_SELECTOR, "#text button")
    assert len(words) == 40
    words[7].click()
    rows = browser.find_elements(By.CSS_SELECTOR, "#effects tr")
    effects = [row.find_elements(By.TAG_NAME, "td")[1].text for row in rows[1:]]
    logit = float(browser.find_element(By.CSS_SELECTOR, "#effects p").text.split()[-1])
    assert sum(map(float, effects)) == pytest.approx(logit, abs=0.05) and len(rows) == 1 + 2 + 50 + 1
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert words[8].get_attribute("class") == "on"
    assert "What the newest segments learned" in browser.find_element(By.ID, "growth").text
    assert browser.save_screenshot(str(tmp_path / "page.png"))
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

"""A finished table in the MLflow UI, as a person uses it: runs are listed, grouped and compared by what was varied."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.pipelines import sweeps
from tests.pipelines.sweep_commands import finish
from tests.pipelines.trainings import query

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SWITCHES = (
    *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=3200,2400"),
)
PATIENCE = 120  # seconds
PERPLEXITY = "ppl/window_mean/512"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no Chromium with its driver: apt-get install chromium chromium-driver",
    ),
]


@pytest.fixture(scope="module")
def experiment(_empty_ledger, tmp_path_factory) -> Iterator[str]:
    """Address of a table of 2 cells with 3 seeds, served by `mlflow ui`."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(_empty_ledger, folder / "mlflow.db")
    finish(folder, sweeps.plan())
    ((number,),) = query(folder, "select experiment_id from experiments where name = 'layers'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ledger = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command = [sys.executable, "-m", "mlflow", "ui", *ledger, "--port", str(port), "--workers", "1"]
    with open(folder / "ui.log", "wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/#/experiments/{number}/runs"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(PATIENCE)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for switch in (*SWITCHES, f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{switch}")
    driver = Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def runs(browser, experiment) -> Chrome:
    """The list of the table's runs, those of cells below the one of the sweep."""
    browser.get(experiment.replace("/#/", "/health#/"))
    browser.execute_script("localStorage.clear(); sessionStorage.clear()")  # the list remembers what was unfolded
    browser.get(experiment)
    click(browser, ".ag-row button[data-component-id*=runnamecellrenderer]")
    WebDriverWait(browser, PATIENCE).until(lambda _: len(listed(browser)) == 7)
    return browser


def test_the_list_shows_row_seed_and_baseline_of_every_run(runs):
    show_columns(runs, "row", "column", "seed", "baseline")
    rows = [[row.get(f"tags.`{tag}`", "-") for tag in ("row", "seed", "baseline")] for row in listed(runs)]
    names = [row["attributes.`Run Name`"] for row in listed(runs)]
    assert "Layers" in names[0]
    assert sorted(rows[1:]) == [
        [f"layers={n}", seed, baseline] for n, baseline in ((1, "true"), (2, "false")) for seed in "012"
    ]
    assert all(f"layers_{row[0][-1]}_seed_{row[1]}" in name for name, row in zip(names[1:], rows[1:], strict=True))


def test_runs_are_grouped_by_a_tag(runs):
    group_by(runs, "row")
    groups = [row["attributes.`Run Name`"].split() for row in listed(runs) if "Group:" in str(row)]
    assert sorted(words[words.index("Group:") + 1 :] for words in groups) == [["layers=1", "3"], ["layers=2", "3"]]


def test_runs_that_are_compared_show_the_varied_parameter_and_the_metric(runs):
    for row in range(1, 7):
        click(runs, f".ag-row[row-index='{row}'] .ag-checkbox-input-wrapper")
    click(runs, "[data-testid=runs-compare-button]")
    click(runs, "button[aria-label='Parameters - Show diff only']")
    WebDriverWait(runs, PATIENCE).until(lambda _: "model.width" not in compared(runs))
    assert "Comparing 6 Runs from 1 Experiment" in runs.find_element(By.TAG_NAME, "body").text
    table = compared(runs)
    assert {name for name in table if "." in name and name.split(".")[0] in ("model", "pretrain")} == {"model.layers"}
    runs_of = zip(table["model.layers"], table["seed"], strict=True)
    assert dict(zip(runs_of, compared_metric(runs, PERPLEXITY), strict=True)) == {
        **{("1", "0"): "10", ("1", "1"): "11", ("1", "2"): "12"},
        **{("2", "0"): "11", ("2", "1"): "11.75", ("2", "2"): "13.25"},
    }


def wait_for(address: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{address} does not answer"
            time.sleep(0.2)


def click(browser: Chrome, css: str, text: str | None = None) -> WebElement:
    """Click what is shown and reads so, as soon as it is there."""

    def clicked(_: Chrome) -> WebElement | None:
        shown = (each for each in browser.find_elements(By.CSS_SELECTOR, css) if each.is_displayed())
        wanted = next((each for each in shown if text is None or each.text == text), None)
        if wanted is not None:
            wanted.click()
        return wanted

    wait = WebDriverWait(browser, PATIENCE, ignored_exceptions=[StaleElementReferenceException])
    found = wait.until(clicked, f"no {css} {text or ''}")
    assert found is not None
    return found


def show_columns(browser: Chrome, *tags: str) -> None:
    click(browser, "[data-testid=column-selection-dropdown]", "Columns")
    search = click(browser, "input[placeholder='Search columns']")
    for tag in tags:
        search.send_keys(Keys.CONTROL, "a")
        search.send_keys(tag)
        tree = f"[data-testid=column-selector-tree] .du-bois-light-tree-treenode-leaf-last span[title='{tag}']"
        click(browser, tree)
    search.send_keys(Keys.ESCAPE)
    WebDriverWait(browser, PATIENCE).until(lambda _: f"tags.`{tags[-1]}`" in listed(browser)[1])


def group_by(browser: Chrome, tag: str) -> None:
    click(browser, "button", "Group by")
    click(browser, "[role=menuitemcheckbox]", tag)
    WebDriverWait(browser, PATIENCE).until(lambda _: "Group:" in str(listed(browser)))


def listed(browser: Chrome) -> list[dict[str, str]]:
    """The rows of the list: column -> text."""
    return browser.execute_script(
        """
        const rows = new Map();
        for (const cell of document.querySelectorAll(".ag-row [col-id]")) {
          const row = Number(cell.closest(".ag-row").getAttribute("row-index"));
          rows.set(row, {...rows.get(row), [cell.getAttribute("col-id")]: cell.innerText.trim()});
        }
        return [...rows.keys()].sort((a, b) => a - b).map(row => rows.get(row));
        """
    )


def compared(browser: Chrome) -> dict[str, list[str]]:
    """Parameters and tags in the comparison: heading -> a text per run."""
    rows = browser.execute_script(
        """
        return [...document.querySelectorAll("tr")].filter(row => row.querySelector("th, td")).map(
          row => [...row.querySelectorAll("th, td")].map(cell => cell.innerText.trim()));
        """
    )
    return {heading: texts for heading, *texts in rows}


def compared_metric(browser: Chrome, name: str) -> list[str]:
    """A metric in the comparison, a text per run; these rows are not a table but a grid of places."""
    return browser.execute_script(
        """
        const links = [...document.querySelectorAll("a[title='Plot chart']")];
        const head = links.find(link => link.innerText.trim() === arguments[0]).parentElement;
        const place = element => element.getBoundingClientRect();
        const beside = element => element !== head && element.style.position === "absolute"
          && element.style.height === head.style.height && Math.abs(place(element).top - place(head).top) < 1;
        return [...document.querySelectorAll("div")].filter(beside)
          .sort((a, b) => place(a).left - place(b).left).map(element => element.innerText.trim());
        """,
        name,
    )

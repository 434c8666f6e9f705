"""What is judged, one after another."""

import os
import signal
import time
from contextlib import contextmanager

import large
from browser import ensure
from front import Front
from up import MODELS

LIMIT_BYTES_PER_S = 20_000
# As many as the largest view may have, whatever the cluster has.
ELEMENTS_MAX = 2_500
MEASURED_S = 10
VIEWERS = 5
# The proxy's address: one of this run's own.
PORT = 28005
TOKEN = "of-32-letters-that-nobody-guesses"
SCHEMES = ["light", "dark"]
VIEWS = ["cluster", "models"]
# How old what is shown is said to be.
AGE_S = "Number.parseFloat(document.getElementById('age').textContent.replace('Shown is how it was', ''))"
LARGE = {"/v2/cluster": large.cluster, "/v2/traffic": large.traffic}
REQUESTS = {"/debug/requests": large.requests}
STAGES = ["receive", "preprocess", "submit", "defer", "queue", "grant", "fetch", "wait", "execute", "push"]


@contextmanager
def front(up, **options):
    proxy = Front((up.host, PORT), up.cluster, **options)
    try:
        yield proxy
    finally:
        proxy.end()


def real(browser, up):
    """`up` with three models: the scheduler's page shows the cluster, the frontend's its models, by the rules of axe"""
    host, port = up.cluster
    url = f"http://{host}:{port}/ui"
    for scheme in SCHEMES:
        with browser.view(url, color_scheme=scheme) as view:
            view.expect("#state").to_have_text("It answers.")
            view.expect("#counts").to_contain_text("9 of 9")
            view.expect("#schedulers tbody").to_contain_text("primary")
            view.expect("#backends .gpu.serving").to_have_count(9)
            view.expect("#frontends tbody").to_contain_text("serving")
            view.axe(f"cluster, {scheme}")
            view.page.click("#to-models")
            for model in MODELS:
                view.expect("#hosted tbody").to_contain_text(model)
            view.expect("#traffic-part").to_be_hidden()
            view.axe(f"where models are, {scheme}")
    host, port = up.models
    with browser.view(f"http://{host}:{port}/ui", color_scheme="dark") as view:
        view.expect("#models").to_be_visible()
        view.expect("#to-cluster").to_be_hidden()
        view.expect("#traffic tbody tr").to_have_count(3)
        # Whenever rates are read, a request may have come just before: it is sent until one is shown.
        shows = "[...document.querySelectorAll('#traffic tbody tr')].find((row) => row.cells[0].innerText == 'digits')"
        while not view.page.evaluate(f"Number.parseFloat({shows}?.cells[1].innerText) > 0"):
            up.infer()
        view.expect("#traffic tbody tr:first-child th").to_have_text("digits")
        view.expect("#traffic tbody tr:first-child meter").to_have_count(1)
        view.axe("models, dark")
    with browser.view(f"http://{host}:{port}/ui/") as view:
        ensure(view.page.url.endswith("/ui"), f"a slash leads to {view.page.url}")
        view.expect("#state").to_have_text("It answers.")


def life(browser, up):
    """one request's life: its stages as a picture and a table, its batch, and why then; by keyboard, at a frontend only"""
    for _ in range(3):
        up.infer()
    host, port = up.models
    for scheme in SCHEMES:
        with browser.view(f"http://{host}:{port}/ui", color_scheme=scheme) as view:
            view.expect("#to-requests").to_be_visible()
            view.page.focus("#to-requests")
            view.page.keyboard.press("Enter")
            view.expect("#recent tbody").to_contain_text("digits")
            view.expect("#life-why").to_have_text("Choose a request by its number.")
            number = view.text("#recent tbody tr:first-child a")
            view.page.focus("#recent tbody tr:first-child a")
            view.page.keyboard.press("Enter")
            view.expect("#life-title").to_have_text(f"The life of request {number}")
            view.expect("#life-why").to_contain_text("so that its batch grows, to 1")
            view.expect("#life-facts").to_contain_text("GPU0 of backend")
            view.expect("#stages tbody th").to_have_text(STAGES)
            view.expect("#life-picture rect").to_have_count(len(STAGES))
            view.expect("#life-picture .window").to_have_count(1)
            view.expect("#recent a[aria-current]").to_have_text(number)
            ensure(view.page.evaluate("document.activeElement.textContent") == number, "a round takes the focus away")
            view.axe(f"a request, {scheme}")
            view.page.reload()
            view.expect("#life-title").to_have_text(f"The life of request {number}")
            # What is listed stays until others are wanted.
            up.infer()
            view.expect("#recent tbody tr:first-child a").to_have_text(number)
            view.page.click("#requests-newest")
            view.expect("#recent tbody tr:first-child a").not_to_have_text(number)
            view.page.select_option("#requests-order", "slowest")
            view.expect("#recent tbody").to_contain_text("digits")
            view.page.fill("#requests-match", "a model that nobody has")
            view.expect("#recent tbody").to_have_text("None that is asked for has ended.")
            view.page.evaluate("location.hash = '#requests/999999999'")
            view.expect("#life-why").to_have_text("It is not known, or not any more.")
            view.expect("#life-part").to_be_hidden()
    host, port = up.cluster
    with browser.view(f"http://{host}:{port}/ui#requests") as view:
        view.expect("#cluster").to_be_visible()
        view.expect("#to-requests").to_be_hidden()


def lives(browser, up):
    """4,096 requests with names, reasons and steps that are markup, behind a proxy's prefix: text, and few elements"""
    with front(up, answers=LARGE | REQUESTS) as proxy:
        for scheme in SCHEMES:
            with browser.view(proxy.url("prefix", "ui#requests/4"), color_scheme=scheme) as view:
                view.expect("#recent tbody tr").to_have_count(20)
                view.expect("#life-facts").to_contain_text(large.MARKUP[0])
                view.expect("#life-why").to_contain_text(large.MARKUP[0])
                view.expect("#steps tbody tr").to_have_count(20)
                view.expect("#steps tbody tr:first-child th").to_have_text(large.MARKUP[3])
                view.expect("#life-picture rect").to_have_count(len(STAGES))
                view.axe(f"requests, {scheme}")
                elements = view.page.evaluate("document.getElementsByTagName('*').length")
                ensure(elements <= ELEMENTS_MAX, f"{elements} elements")
                view.page.focus("#requests-pages button:last-child")
                view.page.keyboard.press("Enter")
                view.expect("#requests-pages").to_contain_text("page 2 of 205")
                view.page.evaluate("location.hash = '#requests/6'")
                view.expect("#life-why").to_contain_text(f"It was not answered: {large.MARKUP[1]}")
                view.expect("#life-part").to_be_hidden()
                view.axe(f"a request that failed, {scheme}")
    return f"{elements} elements"


def policy(browser, up):
    """its policy forbids scripts, styles and questions that are not its own"""
    host, port = up.cluster
    with browser.view(f"http://{host}:{port}/ui") as view:
        append = "document.body.append(Object.assign(document.createElement('%s'), { %s }))"
        script = append % ("script", "textContent: 'window.hit = true'")
        style = append % ("style", "textContent: '* { color: red }'")
        picture = append % ("img", f"src: '{up.http}/a.png'")
        elsewhere = f"fetch('{up.http}/v2').catch(() => 0)"
        for forbidden in [script, style, picture, elsewhere]:
            view.forbids(forbidden)
        view.asked = [url for url in view.asked if not url.startswith(up.http)]


def many(browser, up):
    """200 GPUs and 4,000 models, names that are markup among them, behind a proxy's prefix: text, and few elements"""
    with front(up, answers=LARGE) as proxy:
        for scheme in SCHEMES:
            with browser.view(proxy.url("prefix", "ui"), color_scheme=scheme) as view:
                view.expect("#counts").to_contain_text("173 of 200")
                view.expect("#backends tbody tr").to_have_count(20)
                view.expect("#backends tbody tr:first-child th").to_have_text(large.MARKUP[0])
                view.axe(f"cluster, {scheme}")
                elements = view.page.evaluate("document.getElementsByTagName('*').length")
                view.page.click("#to-models")
                view.expect("#traffic tbody tr").to_have_count(30)
                view.expect("#hosted tbody tr").to_have_count(30)
                shown = view.page.locator("#hosted tbody th").all_text_contents()
                for place, name in enumerate(large.MARKUP):
                    ensure(shown[place].rstrip("…") == name[:120], f"{name[:120]!r} is shown as {shown[place]!r}")
                view.expect("#traffic tbody tr:first-child").to_contain_text(large.MARKUP[0])
                view.axe(f"models, {scheme}")
                view.page.fill("#models-match", "MODEL-3993")
                view.expect("#hosted tbody tr").to_have_count(1)
                view.expect("#traffic tbody tr").to_have_count(1)
                view.expect("#traffic tbody th").to_contain_text("model-3993")
                elements = max(elements, view.page.evaluate("document.getElementsByTagName('*').length"))
                ensure(elements <= ELEMENTS_MAX, f"{elements} elements")
    return f"{elements} elements"


def bytes_a_second(browser, up):
    """a viewer of them takes at most 20 KB/s"""
    told, long = [], []
    with front(up, answers=LARGE) as proxy:
        for name in VIEWS:
            with browser.view(proxy.url(name, f"ui#{name}")) as view:
                view.expect("#state").to_have_text("It answers.")
                before, began = proxy.bytes_sent[name], time.monotonic()
                while time.monotonic() - began < MEASURED_S:
                    proxy.wait_for_requests(name, 1)
                of = (proxy.bytes_sent[name] - before) / (time.monotonic() - began)
                ensure(of <= LIMIT_BYTES_PER_S, f"{name}: {of:.0f} B/s")
                told.append(f"{name} {of / 1e3:.1f} KB/s")
                long += view.page.evaluate("noted.long")
    return f"{', '.join(told)}; tasks above 50 ms: {len(long)}, the longest {max(long, default=0):.0f} ms"


def viewers(browser, up):
    """five viewers of `up` take little of its scheduler"""
    host, port = up.cluster
    views = [browser.view(f"http://{host}:{port}/ui") for _ in range(VIEWERS)]
    for view in views:
        view.expect("#state").to_have_text("It answers.")
    scheduler = up.member("scheduler")
    before, began = cpu_s(scheduler), time.monotonic()
    asked = sum(len(view.asked) for view in views)
    views[0].page.wait_for_timeout(MEASURED_S * 1_000)
    of_core = (cpu_s(scheduler) - before) / (time.monotonic() - began)
    asked = sum(len(view.asked) for view in views) - asked
    for view in views:
        with view:
            pass
    ensure(asked >= VIEWERS, f"they have asked {asked} questions")
    return f"{100 * of_core:.1f} % of a core, {asked} questions"


def cpu_s(process):
    """Of its thread for the listener."""
    for task in os.listdir(f"/proc/{process}/task"):
        name, _, fields = open(f"/proc/{process}/task/{task}/stat").read().partition("(")[2].rpartition(")")
        if name == "admin":
            return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    raise LookupError("no thread admin")


def gone(browser, up):
    """a listener that ends: what it told last stays, with its age; and comes back"""
    with front(up) as proxy:
        with browser.view(proxy.url("p", "ui")) as view:
            view.expect("#counts").to_contain_text("9 of 9")
            proxy.end()
            view.expect("#state").to_have_text("It does not answer. What is shown is what was told last.")
            view.expect("#counts").to_contain_text("9 of 9")
            view.wait(f"{AGE_S} > 2")
            view.axe("without an answer")
            proxy.start()
            view.expect("#state").to_have_text("It answers.")
            view.wait(f"{AGE_S} < 2")


def frontend_killed(browser, up):
    """a frontend that is killed and started again under it: its counts begin anew"""
    up.infer()
    host, port = up.models
    with browser.view(f"http://{host}:{port}/ui") as view:
        view.expect("#totals").to_contain_text("1 of 3")
        os.kill(up.member("frontend-0"), signal.SIGKILL)
        view.expect("#totals").to_contain_text("0 of 3")
        view.expect("#state").to_have_text("It answers.")


def hidden(browser, up):
    """a hidden tab asks nothing, while another one does"""
    with front(up) as proxy:
        with browser.view(proxy.url("hidden", "ui")) as view, browser.view(proxy.url("shown", "ui")) as other:
            view.expect("#state").to_have_text("It answers.")
            other.expect("#state").to_have_text("It answers.")
            hide = "Object.defineProperty(document, 'visibilityState', { value: '%s', configurable: true });"
            tell = "document.dispatchEvent(new Event('visibilitychange'))"
            view.page.evaluate(hide % "hidden" + tell)
            # What was under way has come.
            proxy.wait_for_requests("shown", 4)
            before = proxy.requests["hidden"]
            proxy.wait_for_requests("shown", 6)
            ensure(proxy.requests["hidden"] == before, f"it asked {proxy.requests['hidden'] - before} times")
            view.page.evaluate(hide % "visible" + tell)
            proxy.wait_for_requests("hidden", 1)


def token(browser, up):
    """a token that a proxy wants is sent along, and kept nowhere"""
    with front(up, token=TOKEN) as proxy:
        with browser.view(proxy.url("p", "ui")) as view:
            view.expect("#state").to_have_text("It asks for a token: see the end of this page.")
            view.axe("without a token")
            for found, said in [("wrong", "It does not take this token."), (TOKEN, "It answers.")]:
                view.page.fill("#token", found)
                view.page.press("#token", "Enter")
                view.expect("#state").to_have_text(said)
            view.expect("#counts").to_contain_text("9 of 9")
            ensure(proxy.tokens == {None, "Bearer wrong", f"Bearer {TOKEN}"}, f"the proxy saw {proxy.tokens}")
            kept = view.page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
            ensure(TOKEN not in kept + view.page.content(), f"it is kept: {kept}")
            view.page.reload()
            view.expect("#state").to_have_text("It asks for a token: see the end of this page.")
            view.page.fill("#token", "not ASCII: ü")
            view.page.press("#token", "Enter")
            ensure(not view.page.evaluate("document.getElementById('token').checkValidity()"), "it takes any token")


def keyboard(browser, up):
    """all of it by keyboard, with the focus in sight"""
    with front(up, answers=LARGE) as proxy:
        with browser.view(proxy.url("p", "ui"), reduced_motion="reduce") as view:
            view.expect("#backends tbody tr").to_have_count(20)
            walked = walk(view)
            wanted = ["skip", "to-cluster", "to-models", "members-match", "Next"]
            wanted += ["frontends", "schedulers", "backends", "token"]
            ensure([found for found in walked if found in wanted] == wanted, f"Tab walks {walked}")
            view.page.focus("#skip")
            view.page.keyboard.press("Enter")
            ensure(view.page.evaluate("document.activeElement.id") == "main", "the link skips nothing")
            view.page.focus("#members-pages button:last-child")
            view.page.keyboard.press("Enter")
            view.expect("#members-pages").to_contain_text("page 2 of 3")
            ensure(view.page.evaluate("document.activeElement.textContent") == "Next", "a round takes the focus away")
            view.page.keyboard.press("Space")
            view.expect("#members-pages").to_contain_text("page 3 of 3")
            view.page.keyboard.press("Enter")
            view.page.focus("#members-match")
            view.page.keyboard.type("UNUSABLE")
            view.expect("#backends tbody tr").to_have_count(1)
            view.expect("#backends tbody th").to_have_text("rack42")
            view.expect("#members-pages").to_contain_text("page 1 of 1")
            view.page.focus("#to-models")
            view.page.keyboard.press("Enter")
            view.expect("#traffic tbody tr").to_have_count(30)
            walked = walk(view)
            wanted = ["models-match", "order", "Next", "traffic", "Next", "hosted", "token"]
            ensure([found for found in walked if found in wanted] == wanted, f"Tab walks {walked}")
            moves = view.page.evaluate("getComputedStyle(document.getElementById('standing')).transitionDuration")
            ensure(moves == "0s", f"it moves for {moves}, although less motion is wanted")
            ensure(view.page.evaluate("document.getAnimations().length") == 0, "it has animations")
    return f"{len(walked)} stops"


def walk(view):
    """What Tab leads to, from the start to the end; each must be seen to have the focus."""
    view.page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    view.page.evaluate("getSelection().setPosition(document.body, 0)")
    walked = []
    while len(walked) < 60:
        view.page.keyboard.press("Tab")
        found, outline = view.page.evaluate(
            """() => {
              const { activeElement: at } = document;
              const name = at.id || at.firstElementChild?.id || at.textContent.trim();
              return [at === document.body ? null : name, getComputedStyle(at).outlineStyle];
            }"""
        )
        if found is None or (walked and found == walked[0]):
            break
        ensure(outline != "none", f"{found} has the focus, and does not show it")
        walked.append(found)
    return walked


def take_pictures(browser, up, folder):
    """`up` under load, in each view and scheme."""
    folder.mkdir(exist_ok=True)
    load = up.load(600)
    try:
        for view_name, (host, port) in [("cluster", up.cluster), ("models", up.models), ("requests", up.models)]:
            for scheme in SCHEMES:
                with browser.view(f"http://{host}:{port}/ui", color_scheme=scheme) as view:
                    view.expect("#state").to_have_text("It answers.")
                    if view_name == "models":
                        view.expect("#totals").to_contain_text("5 s")
                    if view_name == "requests":
                        view.page.click("#to-requests")
                        view.page.fill("#requests-match", "resnet50")
                        view.expect("#recent tbody").to_contain_text("resnet50")
                        view.page.click("#recent tbody tr:has-text('in time') a")
                        view.expect("#life-title").to_contain_text("The life of request")
                        view.page.evaluate("document.getElementById('life-title').scrollIntoView()")
                    path = folder / f"{view_name}-{scheme}.png"
                    view.page.screenshot(path=path)
                    print(f"{path.relative_to(folder.parent)}: {path.stat().st_size >> 10} KiB")
    finally:
        load.kill()
        load.wait()


ALL = [real, life, lives, policy, many, bytes_a_second, viewers, gone, frontend_killed, hidden, token, keyboard]

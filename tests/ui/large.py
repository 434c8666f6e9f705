"""A cluster of 200 GPUs and 4,000 models as its members tell of it, whose names are markup in part."""

from front import Wrong

HIT = "window.hit = true"
# The last one is as long as a folder's name can be.
MARKUP = [
    f'<img src=x onerror="{HIT}">',
    f"</th></tr></table><script>{HIT}</script>",
    '" onfocus="window.hit = true" autofocus="',
    "<style>*{display:none}</style>",
    "&lt;b&gt;\u202e\u0000",
    "m" * 255,
]
MODELS = MARKUP + [f"model-{number:04}" for number in range(4000 - len(MARKUP))]
REASONS = ["deadline", "window_missed", MARKUP[0]]


def gpu(number):
    state = "unusable" if number == 171 else "idle" if number % 9 == 8 else "serving"
    return {"index": number % 4, "id": number, "state": state, "models": 4000, "weights_bytes": 16 << 30}


def backend(number):
    weights = {"gpu_bytes": 64 << 30, "gpu_bytes_used": (number + 14) << 30, "host_bytes": 0, "host_bytes_used": 0}
    return {
        "name": MARKUP[0] if number == 0 else f"rack{number}",
        "id": 80 + number,
        "state": "drained" if number == 42 else "serving",
        "obeys": number != 7,
        "address": f"10.0.1.{number}:50412",
        "path": f"soft 10.0.1.{number}:4791",
        "links": 3,
        "gpus": [gpu(4 * number + place) for place in range(4)],
        "models": 4000,
        "safe_to_remove": number != 3,
        "only_here": 2 if number == 3 else 0,
        "only_here_first": MARKUP[:2] if number == 3 else [],
        "weights": weights | {"loads": 12, "failed": 0},
    }


def frontend(number):
    place = {"address": f"10.0.0.{number}:41922", "path": f"soft 10.0.0.{number}:4791"}
    return {"name": f"door{number}", "id": number, "state": "serving", "obeys": True} | place


BACKENDS = [backend(number) for number in range(50)]
FRONTENDS = [frontend(number) for number in range(3)]


def cut(rows, query, size):
    page = int(query.get("page", 0))
    return rows[page * size : (page + 1) * size], max(1, -(-len(rows) // size))


def has(query, *texts):
    return any(query.get("match", "").lower() in text.lower() for text in texts)


def page_of(query, pages):
    page = int(query.get("page", 0))
    if page >= pages:
        raise Wrong(f"page: found {page}, expected one below {pages}")
    return {"page": page, "pages": pages}


def cluster(query):
    """`GET /v2/cluster` at a scheduler."""
    size = int(query["rows"])
    backends = [row for row in BACKENDS if has(query, row["name"], row["state"], *(of["state"] for of in row["gpus"]))]
    frontends = [row for row in FRONTENDS if has(query, row["name"], row["state"])]
    models = [name for name in MODELS if has(query, name)]
    if query["part"] == "members":
        models = []
    else:
        backends, frontends = [], []
    backends, pages = cut(backends, query, size)
    frontends, more = cut(frontends, query, size)
    models, yet_more = cut(models, query, size)
    counts = {"frontends": 3, "backends": 50, "gpus": 200, "models": 4000, "models_hosted": 3990}
    states = enumerate(["primary", "standby", "unreachable"])
    return page_of(query, max(pages, more, yet_more)) | {
        "age_ms": 120.5,
        "scheduler": "rack1",
        "arm": "soft",
        "is_primary": True,
        "epoch": "3.0",
        "schedulers": [{"address": f"10.0.0.{number}:7400", "state": state} for number, state in states],
        "counts": counts | {"frontends_serving": 3, "backends_serving": 49, "gpus_serving": 173},
        "frontends": frontends,
        "backends": backends,
        "models": [{"name": name, "version": "1", "backends": 50, "gpus": 200} for name in models],
    }


def traffic(query):
    """`GET /v2/traffic` at a frontend, whose numbers differ each time."""
    traffic.turn += 1
    models = [name for name in MODELS if has(query, name)]
    shown, pages = cut(models, query, int(query["rows"]))
    rows = [
        {
            "name": name,
            "version": "1" if place % 3 else "2",
            "objective_ms": 25.0 if place % 5 else None,
            **rates(900 - 20 * place + traffic.turn % 10),
        }
        for place, name in enumerate(shown)
    ]
    totals = {"window_ms": 5000, "models": 4000, "asked": 3100, "all": rates(80_000), "rows": rows}
    return page_of(query, pages) | {"frontend": "door0"} | totals


traffic.turn = 0


def rates(requests):
    late, dropped = requests * 0.02, {reason: requests * 0.01 for reason in REASONS}
    times = {"p50_ms": 8.125, "p99_ms": 19.75 + requests % 10, "batch": 7.5}
    counts = {"requests": requests, "good": requests * 0.95, "late": late, "missed": requests * 0.05}
    return counts | {"dropped": dropped} | times


def request(number):
    """Every third one failed."""
    answered = None if number % 3 == 0 else 12.5 + number % 7
    return {
        "request": number,
        "model": MODELS[number % len(MODELS)],
        "took_ms": answered,
        "batch": answered and 4,
        "in_time": answered and number % 5 > 0,
        "error": None if answered else MARKUP[1] * 20,
    }


def life(number):
    """Of one that asked far more models than there can be steps."""
    at = ["arrived", "received", "queued", "due", "granted", "planned", "fetched", "started", "finished", "answered"]
    told = {"request": number, "model": MARKUP[0], "epochs": MARKUP[:2]}
    if number % 3 == 0:
        return told | {"outcome": MARKUP[1] * 20}
    step = {"model": MARKUP[3], "why": MARKUP[2], "microseconds_since_arrival": {"asked": 1.5, "deadline": None}}
    instants = {name: 1000 * place - 500 for place, name in enumerate(at)} | {"exec_at": 6400, "deadline": 9900}
    batch = {"size": 4, "backend": 3, "gpu": 1}
    why = MARKUP[0] + "w" * 5_000
    return told | {"why": why, "batch": batch, "microseconds_since_admission": instants, "steps": [step] * 5_000}


def requests(query):
    rows, pages = cut([request(number) for number in range(4096, 0, -1)], query, int(query["rows"]))
    chosen = int(query.get("request", 0))
    here = {"page": int(query.get("page", 0)), "pages": pages, "last": 4096, "requests": 4096}
    return here | {"rows": rows, "chosen": life(chosen) if 0 < chosen <= 4096 else None}

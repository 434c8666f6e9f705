"""The Containerfile's image, made of a binary that is there already and a base of Debian's packages: its last stage, as
the first one would compile everything once more."""

import json
import shutil
import subprocess
import sys

from place import CONTAINER, MADE, ROOT

sys.path.insert(0, str(ROOT / "tests" / "operate"))
from hosts import install

from chart import must

PLACE = MADE / "image"
BASE = MADE / "base.tar"
MIRROR = "http://deb.debian.org/debian"
# Neither a daemon nor user namespaces are needed.
BUILDAH = ["buildah", "--storage-driver", "vfs", "--root", str(PLACE / "store"), "--runroot", str(PLACE / "run")]


def buildah(*words):
    done = subprocess.run([*BUILDAH, *map(str, words)], capture_output=True, text=True, cwd=ROOT)
    must(done.returncode == 0, f"buildah {words[0]}: {done.stderr[-1500:]}")
    return done.stdout.strip()


def make_base():
    """What `debian:bookworm-slim` is made of."""
    if BASE.exists():
        return
    root = PLACE / "base"
    log = PLACE / "debootstrap.log"
    with log.open("wb") as out:
        command = ["debootstrap", "--variant=minbase", "bookworm", root, MIRROR]
        done = subprocess.run(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    must(done.returncode == 0, f"debootstrap: {log.read_text()[-500:]}")
    part = BASE.with_suffix(".part")
    subprocess.run(["tar", "--create", "--file", part, "--directory", root, "--exclude=./dev/*", "."], check=True)
    part.rename(BASE)
    shutil.rmtree(root)


def image_of(name, folder, text):
    (folder / "Containerfile").write_text(text)
    buildah("build", "--quiet", "--tag", name, folder)


def make(binary):
    """Builds the image, and yields its root file system."""
    install(["buildah", "debootstrap", "strip", "readelf"], ["buildah", "debootstrap", "binutils"])
    shutil.rmtree(PLACE, ignore_errors=True)
    for folder in ("base-image", "built"):
        (PLACE / folder).mkdir(parents=True)
    make_base()
    shutil.copy(BASE, PLACE / "base-image" / "base.tar")
    image_of("localhost/base:bookworm", PLACE / "base-image", "FROM scratch\nADD base.tar /\n")
    # What the first stage ends with.
    subprocess.run(["strip", "-o", PLACE / "built" / "downbeat", binary], check=True)
    image_of("localhost/built", PLACE / "built", "FROM scratch\nCOPY downbeat /downbeat\n")
    of = ["--build-arg", "BASE=localhost/base:bookworm", "--build-context", "build=container-image://localhost/built"]
    file = ["--file", CONTAINER / "Containerfile", "--ignorefile", CONTAINER / "ignore"]
    buildah("build", "--quiet", "--isolation", "chroot", *file, *of, "--tag", "localhost/downbeat", ".")
    check()
    return buildah("mount", buildah("from", "localhost/downbeat"))


def check():
    config = json.loads(buildah("inspect", "--type", "image", "localhost/downbeat"))["OCIv1"]["config"]
    must(config["User"] == "65532:65532", f"the image runs as {config.get('User')}")
    must(config["Entrypoint"] == ["/usr/bin/downbeat"], f"the image runs {config.get('Entrypoint')}")
    root = buildah("mount", buildah("from", "localhost/downbeat"))
    told = subprocess.run(
        ["readelf", "--sections", f"{root}/usr/bin/downbeat"], capture_output=True, text=True, check=True
    ).stdout
    must(".text" in told and ".symtab" not in told, "the binary is not stripped")


def end():
    subprocess.run([*BUILDAH, "rm", "--all"], capture_output=True)
    shutil.rmtree(PLACE, ignore_errors=True)

"""Where things are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "downbeat"
CONTAINER = ROOT / "deploy" / "container"
RUNTIME = ROOT / "deploy" / "kserve" / "runtime.yaml"
MADE = ROOT / "target" / "deploy"

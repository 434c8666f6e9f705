"""Models in Python for downbeat: a subclass of `Model` in `<repository>/<model>/<version>/model.py`."""

from downbeat.model import Context, Model, TensorSpec

__all__ = ["Context", "Model", "TensorSpec"]

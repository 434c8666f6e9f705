"""Models in Python for downbeat: a subclass of `Model` in `<repository>/<model>/<version>/model.py`; and `serve`, which
serves a repository from Python."""

from downbeat.model import Context, Model, TensorSpec
from downbeat.up import ServeError, Server, serve

__all__ = ["Context", "Model", "ServeError", "Server", "TensorSpec", "serve"]

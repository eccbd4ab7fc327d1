"""SGLang's HTTP app as its tokenizer workers serve it (``--tokenizer-worker-num``).

They are processes of the web server, which import the app by the name in ``SGLANG_HTTP_SERVER_APP_PATH`` and load no
plugins (``http_server.py:_setup_and_run_http_server``). The hooks have to be there before the app is, because FastAPI
builds the schemas of its requests then.
"""

from __future__ import annotations

from sgl_shift_patches import registry

registry.install(registry.HTTP)

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]

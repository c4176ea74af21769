"""The chat page: one file without outside assets, which talks to the server it came from."""

from __future__ import annotations

import json
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from meshwright.serving.http.service import Service
from meshwright.text import chat_template

SETTINGS = '"SETTINGS OF THE SERVER"'
"""What stands in the file where the settings go."""

HEADERS = {
    # What a model writes is shown as text; nothing is loaded from elsewhere, and no other page may frame this one.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def chat_page(service: Service) -> Response:
    """The page of a service."""
    settings = {
        "model": service.model,
        "has_chat": service.tokenizer is not None and chat_template(service.tokenizer) is not None,
        "has_keys": bool(service.api_keys),
    }
    # A name with "</script>" in it would end the script.
    written = json.dumps(settings).replace("<", "\\u003c")
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text.replace(SETTINGS, written), headers=HEADERS)

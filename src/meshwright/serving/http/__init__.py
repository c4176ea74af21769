"""The HTTP server: endpoints of OpenAI, EasyLM and LWM, metrics and a chat page, for any `EngineClient`.

`middleware` checks the API key and readiness, `hosts` refuses requests for other hosts. `endpoint` parses the body into
the pydantic model of its endpoint (`request_body`); the endpoint's handler, in `openai/` or `easylm/`, builds the
engine's requests. `async_engine` passes outputs from the engine's thread to the event loop; `openai.responses` turns
them into whole or streamed responses. `server` runs the app with uvicorn, and `connection` limits connections.
"""

"""The HTTP server: OpenAI's endpoints, EasyLM's and LWM's, metrics and a chat page, for any `EngineClient`.

`middleware` checks the API key and readiness, `hosts` refuses requests for other hosts. `endpoint` reads a body into
the pydantic model of its endpoint (`request_body`); its handler, in `openai/` or `easylm/`, makes the engine's
requests. `async_engine` passes outputs from the engine's thread to the event loop; `openai.responses` builds responses
and streams of them. `server` runs the app with uvicorn, and `connection` limits connections. Nothing outside this
package knows HTTP.
"""

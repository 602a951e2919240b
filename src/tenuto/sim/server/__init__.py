"""The simulated engine behind an OpenAI-compatible server.

app ─► generate ─► request ─► tokens           a request's bytes become the engine's request
          │
          └─► engine ─► event_loop             a clock advances the engine; tokens are sent as they come
control, metrics                               what operators change and see
"""

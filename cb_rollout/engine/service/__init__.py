"""Accept requests from any thread, step the engine on one thread, and deliver outputs."""

"""Build answers of the endpoints that generate, with tool calls; read OpenAI's Responses API."""

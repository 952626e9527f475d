"""Answers of the endpoints that generate, tool calls in them, and OpenAI's Responses API."""

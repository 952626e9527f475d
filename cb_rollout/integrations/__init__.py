"""Connect TRL, Ray, xgrammar and OpenTelemetry; each is imported in one file, or in a folder.

Called by users' scripts and by the trainers that are attached.
"""

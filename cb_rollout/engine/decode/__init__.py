"""Hold the port `DecodePath`, the plain path, and what every step of an engine works on."""

"""How far two numbers may be apart, and why: every tolerance by which a replay is judged (docs/tolerances.md)."""

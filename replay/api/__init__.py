"""What `import replay` offers to programs and notebooks: replays, logs and captures as objects. See docs/api.md."""

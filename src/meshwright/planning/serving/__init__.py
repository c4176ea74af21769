"""Plans to serve a model: `plan` predicts one layout and batch, `search` finds the best."""

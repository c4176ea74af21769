"""The processes of one run: they find each other, compare their settings, and detect processes that are lost."""

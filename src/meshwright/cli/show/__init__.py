"""`meshwright show` is `command`, and `meshwright show pipeline` is `pipeline`."""

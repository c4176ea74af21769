"""`command` is `meshwright show`; `pipeline` is `meshwright show pipeline`."""

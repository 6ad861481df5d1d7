if __name__ != "durable.recovery":
    raise ImportError("import durable.recovery, not recovery: a second copy of every class would be loaded")

"""A notebook with other values in its parameters cell, so that a test of it takes seconds."""


def small(notebook, overrides):
    """Put other values into the parameters cell, under the names that it has."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    values = {}
    exec(cell.source, {}, values)  # literals only, as test_repository makes sure
    assert overrides.keys() <= values.keys(), "the parameters cell defines no such name"
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in (values | overrides).items())

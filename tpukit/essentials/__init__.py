"""The thin helper, all that a notebook needs: machine, show, backends, data, run. It runs without the other rooms."""

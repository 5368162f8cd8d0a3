"""Load the models that MODEL arguments name: `loading.load_net` returns a checked `Net`."""

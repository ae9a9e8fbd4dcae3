"""How a document is checked: paths of keys, rules between keys, bounds, and descriptions of problems."""

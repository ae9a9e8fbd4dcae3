"""How a document is checked: paths of keys, rules between keys in Python and in CEL, and the problems that are told."""

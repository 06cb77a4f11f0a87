"""x"""


def resolve_roles(s):
    return {}

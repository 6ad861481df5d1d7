"""Description of an application: what it offers, calls, handles and sends, for people, for tools, and for comparison.

compatibility   what one schema allows that another refuses
document        the canonical description, and how it is read
survey          the description of an application
changes         what became of a description, and what of it others notice
asyncapi        the same as an AsyncAPI document
"""

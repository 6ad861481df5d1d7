"""SQL statements, one module for each subject. Placeholders {schema} and {...} are filled when a statement is built."""

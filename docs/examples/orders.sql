CREATE TABLE orders (
    id uuid PRIMARY KEY,
    amount integer NOT NULL,
    invoice integer
);

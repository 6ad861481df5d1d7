CREATE TABLE invoices (
    number integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id uuid NOT NULL,
    amount integer NOT NULL
);

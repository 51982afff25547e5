#include <metal_stdlib>
using namespace metal;

// Queries and keys turned by their places, as Llama's: the halves of a head's columns are the two coordinates. A thread
// for each pair of coordinates. The gradient turns the other way.
struct View {  // elements from one to the next; columns are side by side
  int batch, head, place;
};
struct Call {
  int heads, shared, places, half_width, back;  // heads of queries and of keys
  View query, key, turned_query, turned_key;
  int angle_batch, angle_place;
};

template <typename T>
[[kernel]]
void turn(device T *turned_query [[buffer(0)]], device T *turned_key [[buffer(1)]], const device T *query [[buffer(2)]],
            const device T *key [[buffer(3)]], const device T *cosines [[buffer(4)]],
            const device T *sines [[buffer(5)]], constant Call &call [[buffer(6)]],
            uint number [[thread_position_in_grid]]) {
  const int column = number % call.half_width, heads = call.heads + call.shared;
  int rest = number / call.half_width;
  const int one = rest % heads;
  rest /= heads;
  const int place = rest % call.places, batch = rest / call.places, other = column + call.half_width;
  const bool of_key = one >= call.heads;
  const int head = of_key ? one - call.heads : one;
  constant View &from = of_key ? call.key : call.query, &to = of_key ? call.turned_key : call.turned_query;
  const device T *x = (of_key ? key : query) + (long(batch) * from.batch + long(head) * from.head + long(place) * from.place);
  device T *y = (of_key ? turned_key : turned_query) + (long(batch) * to.batch + long(head) * to.head + long(place) * to.place);
  const long angle = long(batch) * call.angle_batch + long(place) * call.angle_place;
  const float first = float(x[column]), second = float(x[other]);
  const float cosine = float(cosines[angle + column]), sine = float(sines[angle + column]);
  const float far_cosine = float(cosines[angle + other]), far_sine = float(sines[angle + other]);
  y[column] = T(first * cosine + (call.back ? second * far_sine : -second * sine));
  y[other] = T(second * far_cosine + (call.back ? -first * sine : first * far_sine));
}

template [[host_name("turn_float")]] [[kernel]] decltype(turn<float>) turn<float>;
template [[host_name("turn_half")]] [[kernel]] decltype(turn<half>) turn<half>;
template [[host_name("turn_bfloat")]] [[kernel]] decltype(turn<bfloat>) turn<bfloat>;
